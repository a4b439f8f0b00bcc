"""Which globals a stream may name: hostile ones are refused when they are named, whether or not they are called.

Nothing is ever executed here, so a list that misses a name costs a warning, not safety: what is not on it becomes an
``Opaque`` value. The list exists to tell the owner of a file that it was made to attack.
"""

from __future__ import annotations

from ...core.errors import CorruptError
from .records import GlobalRef

__all__ = ["checked_global"]

_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg", "exceptions": "builtins"}
"""Modules that protocols 0 to 2 name as Python 2 did (PEP 3108; ``fix_imports`` of ``pickle.load``)."""
_PYTHON_2_BUILTINS = {"xrange": "range", "unicode": "str", "long": "int"}

_MAX_NAME = 500

_HARMLESS_BUILTINS = frozenset((
    "NotImplemented", "Ellipsis", "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int",
    "list", "object", "range", "set", "slice", "str", "tuple", "type",
))  # fmt: skip

_HOSTILE_MODULES = frozenset((
    "os", "posix", "nt", "ntpath", "posixpath", "subprocess", "_posixsubprocess", "sys", "importlib",
    "_frozen_importlib", "imp", "runpy", "pty", "socket", "_socket", "_codecs", "socketserver", "ssl", "select",
    "selectors", "shutil", "ctypes", "_ctypes", "cffi", "_cffi_backend", "operator", "_operator", "webbrowser",
    "code", "codeop", "codecs", "commands", "popen2", "pip", "pickle", "_pickle", "cPickle", "pickletools",
    "shelve", "dill", "cloudpickle", "joblib", "marshal", "types", "new", "inspect", "timeit", "pdb", "bdb",
    "cProfile", "profile", "trace", "doctest", "tempfile", "platform", "http", "urllib", "urllib2", "httplib",
    "requests", "aiohttp", "ftplib", "smtplib", "telnetlib", "imaplib", "poplib", "xmlrpc", "zipimport",
    "pkgutil", "pydoc", "fileinput", "io", "_io", "atexit", "gc", "linecache", "site", "venv", "ensurepip",
    "setuptools", "distutils", "multiprocessing", "threading", "_thread", "asyncio", "concurrent", "asyncore",
    "asynchat", "mmap", "sqlite3", "tarfile", "zipfile", "idlelib", "lib2to3", "antigravity", "turtle",
    "builtins", "__builtin__", "numpy.testing", "numpy.f2py", "torch.hub", "torch.jit", "torch.package",
    "torch.utils.cpp_extension", "torch.utils.data.datapipes", "signal", "nturl2path", "glob", "pexpect",
    "paramiko", "fabric", "jinja2", "yaml", "django", "flask",
))  # fmt: skip

_HOSTILE_ANYWHERE = frozenset((
    "os", "posix", "nt", "sys", "subprocess", "builtins", "__builtin__", "importlib", "ctypes", "pickle",
    "socket", "pty", "shutil", "runpy",
))  # fmt: skip
"""Refused as any part of a dotted path too: ``torch.os`` or the qualified name ``serialization.os.system``."""

_HOSTILE_NAMES = frozenset((
    "system", "popen", "Popen", "exec", "execfile", "execv", "execve", "eval", "compile", "open", "getattr",
    "setattr", "delattr", "__import__", "import_module", "apply", "spawn", "spawnv", "spawnl", "fork", "forkpty",
    "load", "loads", "Unpickler", "load_module", "exec_module", "check_output", "check_call", "getoutput",
    "getstatusoutput", "attrgetter", "methodcaller", "itemgetter", "partial", "partialmethod", "globals",
    "locals", "vars", "breakpoint", "input", "reduce", "unlink", "rmdir", "rmtree", "write_text", "write_bytes",
    "runstring", "runcode", "runsource", "run_path", "run_module", "run_string", "FunctionType", "CodeType",
    "LambdaType",
))  # fmt: skip
"""Refused as the last part of a name, whatever the module."""

_HARMLESS = frozenset(
    {
        GlobalRef("_codecs", "encode"),  # numpy and Python 3 write bytes so in protocol 2; done here, for latin-1 only
        GlobalRef("io", "BytesIO"),  # becomes an opaque value
        GlobalRef("types", "SimpleNamespace"),
        GlobalRef("types", "NoneType"),
    }
)


def checked_global(module: str, name: str) -> GlobalRef:
    """The reference to a global. Raises ``CorruptError`` that names a hostile or malformed one."""
    if len(module) + len(name) > _MAX_NAME or not (_is_path(module) and _is_path(name)):
        raise CorruptError("the pickle names a global that cannot exist", found=f"{module!r:.80} {name!r:.80}")
    ref = GlobalRef(_PYTHON_2.get(module, module), name)
    if module == "__builtin__":
        ref = GlobalRef(ref.module, _PYTHON_2_BUILTINS.get(name, name))
    if _hostile(ref):
        raise CorruptError(
            f"the pickle names {module}.{name}, which can run code; nothing of it was executed",
            hint="do not open this file with torch.load or pickle.load",
        )
    return ref


def _is_path(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def _hostile(ref: GlobalRef) -> bool:
    if ref in _HARMLESS:
        return False
    if ref.module == "builtins":
        return ref.name not in _HARMLESS_BUILTINS and not _names_exception(ref.name)
    if ref.module == "signal":
        return ref.name not in ("Signals", "Handlers", "Sigmasks") and not ref.name.startswith("SIG")
    path = ref.module.split(".")
    names = ref.name.split(".")
    return (
        any(".".join(path[:end]) in _HOSTILE_MODULES for end in range(1, len(path) + 1))
        or not _HOSTILE_ANYWHERE.isdisjoint(path)
        or (len(names) > 1 and not _HOSTILE_MODULES.isdisjoint(names[:-1]))
        or names[-1] in _HOSTILE_NAMES
        or any(_is_special(part) for part in (*path[1:], *names))
        or (_is_special(path[0]) and path[0] != "__main__")
    )


def _names_exception(name: str) -> bool:
    return name.endswith(("Error", "Exception", "Warning")) or name in ("StopIteration", "KeyboardInterrupt")


def _is_special(part: str) -> bool:
    """A name such as ``__globals__`` leads from any object to the interpreter; ``__newobj__`` is a rule of PEP 307."""
    return part.startswith("__") and part.endswith("__") and part not in ("__newobj__", "__newobj_ex__")
