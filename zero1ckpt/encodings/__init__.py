"""How a payload lies inside an object."""
