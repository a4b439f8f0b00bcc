"""The torch_dist container against torch: torch.distributed.checkpoint, torch.load, and zip's own checks."""

import io
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zero1ckpt
from tests.strategies import small_state
from zero1ckpt.core.errors import UnsupportedError


def state():
    made = small_state(2)
    made["zero"] = {"fp32_param": torch.zeros(0, 3), "exp_avg": torch.zeros(0, 3), "step": torch.tensor(2.0)}
    made["dot"] = {"fp32_param": torch.tensor(1.5), "exp_avg": torch.tensor(-0.0), "step": torch.tensor(2.0)}
    made["wide"] = {"fp32_param": torch.randn(3, 5, 7), "exp_avg": torch.randn(3, 5, 7), "step": torch.tensor(2.0)}
    for slots in made.values():
        slots["exp_avg"] = slots["exp_avg"].bfloat16()
    return made


@pytest.fixture
def saved(tmp_path):
    options = zero1ckpt.FormatOptions(shard_bytes=20_000)
    wanted = state()
    zero1ckpt.write(
        tmp_path / "c", wanted, dp_size=3, format="fully_reshardable", container="torch_dist", options=options
    )
    return tmp_path / "c", wanted


def test_torch_distributed_checkpoint_loads_it_into_a_plain_state_dict(saved):
    path, wanted = saved
    empty = {
        name: {slot: torch.full_like(t, 7) for slot, t in slots.items() if slot != "step"}
        for name, slots in wanted.items()
    }
    loaded = {"state": empty}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(loaded, checkpoint_id=str(path), no_dist=True)
    for name, slots in loaded["state"].items():
        for slot, tensor in slots.items():
            assert tensor.dtype == wanted[name][slot].dtype
            assert torch.equal(tensor.view(torch.uint8) if tensor.ndim else tensor, _bits(wanted[name][slot])), name


def _bits(tensor):
    return tensor.view(torch.uint8) if tensor.ndim else tensor


def test_every_chunk_is_an_archive_that_torch_and_zip_accept(saved):
    path, wanted = saved
    metadata = dcp.FileSystemReader(str(path)).read_metadata()
    assert len(metadata.storage_data) == sum(len(slots) - ("step" in slots) for slots in wanted.values())
    for index, place in metadata.storage_data.items():
        data = (path / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None
        tensor = torch.load(io.BytesIO(data), weights_only=True)
        _, name, slot = metadata.planner_data[index.fqn]
        assert torch.equal(tensor, wanted[name][slot]) and tensor.shape == wanted[name][slot].shape


def test_a_slot_whose_name_would_be_ambiguous_is_refused(tmp_path):
    bad = {"w": {"fp32_param": torch.ones(3), "a.b": torch.ones(3)}}
    with pytest.raises(UnsupportedError, match=r"dot in its name"):
        zero1ckpt.write(tmp_path / "x", bad, dp_size=1, format="fully_reshardable", container="torch_dist")
    assert not list(tmp_path.iterdir())
