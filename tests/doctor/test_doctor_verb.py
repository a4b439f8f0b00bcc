"""``doctor`` on real Megatron checkpoints and on native ones: what is called damaged, and the mended copy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import zero1ckpt
from tests.foreign.megatron.test_model_space import global_truth, index
from zero1ckpt.api.doctoring import diagnose, mend
from zero1ckpt.cli.main import run
from zero1ckpt.core.errors import OutputError, UnsupportedError, UsageError

FIELDS = {"fp32_param": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def saves(*, damaged: bool) -> list[tuple[str, str]]:
    found = [
        (case, save)
        for case, row in index().items()
        for save, told in row["formats"].items()
        if (told["stored_values_equal_truth"] is False) == damaged
    ]
    return found or [("no corpus", "none")]


@pytest.mark.parametrize(("case", "save"), saves(damaged=False))
def test_no_sound_checkpoint_is_called_damaged(corpus: Callable[..., Path], case: str, save: str) -> None:
    found = diagnose(corpus(case, save))
    assert [finding.message for finding in found.findings] == []
    assert not [notice for notice in found.notices if notice.kind not in ("padding", "reading")]


@pytest.mark.parametrize(("case", "save"), saves(damaged=True))
def test_the_mended_copy_holds_the_truth(corpus: Callable[..., Path], tmp_path: Path, case: str, save: str) -> None:
    source = corpus(case, save)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    found = diagnose(source)
    assert {finding.kind for finding in found.findings} == {"shifted_state"}
    with pytest.raises(UnsupportedError, match="--zero-lost-moments"):
        mend(found, source, tmp_path / "refused")
    made = mend(found, source, tmp_path / "mended", zero_lost_moments=True)
    assert made is not None
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert {path.name: path.stat().st_size for path in made.path.iterdir()} == {n: len(d) for n, d in before.items()}
    assert diagnose(made.path).ok
    truth = global_truth(corpus(case))
    lost = {(param, slot): rows for _, param, slot, rows in (*made.restored_rows, *made.zeroed_rows)}
    mended = zero1ckpt.open(made.path)
    for name in mended.names():
        for slot, field in FIELDS.items():
            values = mended.read(name, slot).numpy().reshape(-1)
            kept = np.ones(values.size, np.bool_)
            for low, high in lost.get((name, slot), ()):
                kept[low:high] = False
                assert slot == "fp32_param" or not values[low:high].any()
            wanted = truth[f"{name}/{field}"].reshape(-1).astype(np.float32)
            assert values[kept].tobytes() == wanted[kept].tobytes()
            assert kept.all() or slot != "fp32_param" or _rounds_to(values[~kept], wanted[~kept])
    _torch_reads(made.path)


def _rounds_to(values: np.ndarray, truth: np.ndarray) -> bool:
    return torch.equal(torch.from_numpy(values).bfloat16(), torch.from_numpy(truth.copy()).bfloat16())


def _torch_reads(folder: Path) -> None:
    """Every archive of the mended files, checksums included."""
    from io import BytesIO

    from zero1ckpt.encodings.dcp_metadata import parse_metadata

    metadata = parse_metadata((folder / ".metadata").read_bytes())
    for entry in metadata.tensors.values():
        for row in range(len(entry)):
            data = (folder / metadata.files[int(entry.files[row])]).read_bytes()
            at = int(entry.at[row])
            tensor = torch.load(BytesIO(data[at : at + int(entry.nbytes[row])]), weights_only=True)
            assert list(tensor.shape) == entry.sizes[row].tolist()


def test_the_verb_tells_what_it_found_and_wrote(
    corpus: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = corpus("v0161_toy_dp2_b2500") / "fully_reshardable"
    assert run(["doctor", str(folder), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "zero1ckpt.doctor/1" and told["ok"] is False
    assert set(told["findings"][0]) == {"kind", "part", "param", "slot", "range", "file", "message"}
    assert run(["doctor", str(folder), "--repair", str(tmp_path / "out")]) == 5
    assert "--zero-lost-moments" in capsys.readouterr().err and not (tmp_path / "out").exists()
    options = ["--repair", str(tmp_path / "out"), "--zero-lost-moments"]
    assert run(["doctor", str(folder), *options, "--json"]) == 0
    repair = json.loads(capsys.readouterr().out)["repair"]
    assert repair["from_weights"] == 193 and repair["zeroed"] == 386
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert run(["doctor", str(tmp_path / "out")]) == 0
    assert run(["doctor", str(folder), *options]) == 6
    assert run(["doctor", str(folder), "--zero-lost-moments"]) == 2


def test_what_cannot_be_written_or_mended(corpus: Callable[..., Path], tmp_path: Path) -> None:
    folder = corpus("v0161_toy_dp2_b2500", "fully_reshardable")
    found = diagnose(folder)
    with pytest.raises(UsageError, match="beside"):
        mend(found, folder, folder, zero_lost_moments=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OutputError):
        mend(found, folder, tmp_path / "full", zero_lost_moments=True)
    examination = found.examinations[""]
    assert examination.shift is not None
    examination.shift = replace(examination.shift, undecided=1)
    with pytest.raises(UnsupportedError, match="not all layouts"):
        mend(found, folder, tmp_path / "undecided", zero_lost_moments=True)
    assert not (tmp_path / "undecided").exists()
    sound = corpus("v0161_toy_dp1_b1", "fully_reshardable")
    assert mend(diagnose(sound), sound, tmp_path / "none") is None
    assert not (tmp_path / "none").exists()


def native(path: Path, *, bad: float | None = None, step: int = 3) -> Path:
    generator = torch.Generator().manual_seed(0)
    state = {
        name: {
            "fp32_param": torch.randn(20, 30, generator=generator),
            "exp_avg": torch.randn(20, 30, generator=generator),
            "exp_avg_sq": torch.rand(20, 30, generator=generator) + 0.1,
        }
        for name in ("a", "b")
    }
    if bad is not None:
        state["b"]["exp_avg_sq"][1, 2] = bad
    params = {name: {"dtype": "bfloat16", "grad_dtype": "float32"} for name in state}
    zero1ckpt.write(path, state, dp_size=2, step=step, params=params, overwrite=False)
    return path


def test_native_checkpoints_too(tmp_path: Path) -> None:
    assert diagnose(native(tmp_path / "good")).ok
    (finding,) = diagnose(native(tmp_path / "bad", bad=-1.0)).findings
    assert (finding.kind, finding.param, finding.slot, finding.range) == (
        "negative_squares",
        "b",
        "exp_avg_sq",
        (32, 33),
    )
    with pytest.raises(UnsupportedError, match="can be mended"):
        mend(diagnose(tmp_path / "bad"), tmp_path / "bad", tmp_path / "out")


def test_two_checkpoints_of_a_run_with_the_same_state(tmp_path: Path) -> None:
    native(tmp_path / "step-3")
    assert diagnose(native(tmp_path / "step-4", step=4)).findings[0].kind == "repeated_checkpoint"
    repeated = diagnose(native(tmp_path / "step-5", step=4))
    assert repeated.ok and repeated.notices[0].kind == "repeated_checkpoint"


def test_an_entry_that_is_not_where_the_metadata_says(corpus: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    source = corpus("v0161_toy_dp1_b1", "fully_reshardable")
    for damage in ("missing", "truncated"):
        folder = tmp_path / damage
        shutil.copytree(source, folder, copy_function=shutil.copyfile)
        folder.chmod(0o755)
        file = next(iter(sorted(folder.glob("__*.distcp"))))
        if damage == "missing":
            file.unlink()
        else:
            data = file.read_bytes()
            file.write_bytes(data[: len(data) // 2])
        found = diagnose(folder)
        assert {finding.kind for finding in found.findings} == {"entry"}
