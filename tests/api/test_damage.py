"""Damaged input and failing output: the right exit code, one line that names the place, nothing left or lost."""

import errno
import os
import shutil
import subprocess
import sys

import msgspec
import pytest
import torch
from msgspec import structs

import zero1ckpt
from tests.faults import calls, count_calls
from tests.strategies import flip, small_state, tree
from zero1ckpt.api import verify
from zero1ckpt.api.stored import describe
from zero1ckpt.core.digest import crc64, format_digest
from zero1ckpt.model.manifest import decode_manifest, encode_manifest
from zero1ckpt.storage.local import LocalStore

SHAPES = ((40, 3), (64,), (0,), (), (31,), (300,))
STATE = small_state(1, SHAPES)
RANK = "rank-00001-of-00003.safetensors"


@pytest.fixture
def src(work):
    write(work / "src")
    return work / "src"


def write(path, state=STATE, **keywords):
    keywords = {"dp_size": 3, "bucket_size": 200, "workers": 1, "extra": {"t": torch.arange(9)}} | keywords
    return zero1ckpt.write(path, state, **keywords)


def reshard(work, dst="dst", **keywords):
    return zero1ckpt.reshard(work / "src", work / dst, **{"to_dp": 2, "workers": 1} | keywords)


def refused(work, code, *names, match=None, call=reshard, **keywords):
    """Asserts that the call fails with an exit code, names a place in one line, and changes nothing."""
    before = tree(work)
    with pytest.raises(zero1ckpt.Zero1CkptError, match=match) as caught:
        call(work, **keywords)
    line = str(caught.value)
    assert caught.value.exit_code == code, line
    assert "\n" not in line and all(name in line for name in names), line
    assert tree(work) == before
    return line


# -------------------------------------------------------------------------------------------------------------- input


def test_a_forged_number_of_ranks_is_refused_at_once(work, src):
    manifest = decode_manifest((src / "manifest.json").read_bytes(), "m").manifest
    part = manifest.parts[0]
    many = structs.replace(part, layout=structs.replace(part.layout, dp_size=10**12))
    (src / "manifest.json").write_bytes(encode_manifest(structs.replace(manifest, parts=[many])))
    refused(work, 4, "manifest.json", "does not list a file that its layout needs")


@pytest.mark.parametrize("name", [RANK, "extra.safetensors"])
@pytest.mark.parametrize("keep", [0, 7, 8, 100, 4095, 4096, -1])
def test_truncated(work, src, name, keep):
    data = (src / name).read_bytes()
    (src / name).write_bytes(data[:keep])
    refused(work, 4, name, "truncated", "found", "expected")
    answer = verify(src)
    assert [f.kind for f in answer.findings if f.file == name] == ["truncated_file"]
    with pytest.raises(zero1ckpt.Zero1CkptError):
        zero1ckpt.open(src)


@pytest.mark.parametrize("way", ["absolute", "relative", "folder", "manifest's"])
@pytest.mark.parametrize("check_files", [True, False])
def test_a_listed_file_that_is_a_link_out_of_the_folder(work, src, way, check_files):
    """Its content is right, or anything: what lies elsewhere is not the checkpoint's."""
    if way == "folder":
        write(work / "zarr", format="fully_reshardable", container="zarr", dp_size=1, bucket_size=None)
        (src, name) = work / "zarr", next(p.name for p in (work / "zarr").iterdir() if p.is_dir())
    else:
        name = "manifest.json" if way == "manifest's" else RANK
    (src / name).rename(work / "elsewhere")
    (src / name).symlink_to(work / "elsewhere" if way == "absolute" else "../elsewhere")
    if way == "manifest's":  # which is not listed, and copied nowhere
        assert verify(src, deep=True)
        return
    refused(work, 4, name, "leads out of", "elsewhere", call=lambda work: describe(src, check_files=check_files))
    refused(work, 4, name, "leads out of", call=lambda work: verify(src))
    refused(work, 4, name, "leads out of", call=lambda work: zero1ckpt.open(src))
    refused(work, 4, name, "leads out of", call=lambda work: zero1ckpt.reshard(src, work / "dst", to_dp=1))


def test_links_inside_a_checkpoint_and_to_one_are_fine(work, src):
    (work / "elsewhere").mkdir()
    (work / "elsewhere" / "link").symlink_to("../src")
    (src / RANK).rename(src / "kept")
    (src / RANK).symlink_to("kept")
    linked = work / "elsewhere" / "link"
    assert verify(linked, deep=True) and zero1ckpt.open(linked).extra["t"].tolist() == list(range(9))
    zero1ckpt.reshard(linked, work / "dst", to_dp=2)
    assert verify(work / "dst", against=src)


def test_longer(work, src):
    with (src / RANK).open("ab") as file:
        file.write(b"\0")
    refused(work, 4, RANK, "longer")
    assert [f.kind for f in verify(src).findings] == ["long_file"]


@pytest.mark.parametrize("name", [RANK, "extra.safetensors", "rank-00000-of-00003.safetensors"])
def test_missing(work, src, name):
    (src / name).unlink()
    refused(work, 3, name, "missing")
    assert [f.kind for f in verify(src).findings] == ["missing_file"]


def test_a_folder_in_place_of_a_file(work, src):
    (src / RANK).unlink()
    (src / RANK).mkdir()
    line = refused(work, 4, RANK)
    assert "Errno" not in line
    assert not verify(src, deep=True)


def test_swapped(work, src):
    other = "rank-00000-of-00003.safetensors"
    os.rename(src / RANK, src / "x")
    os.rename(src / other, src / RANK)
    os.rename(src / "x", src / other)
    refused(work, 4, "rank-0000", match="swapped")
    assert {f.file for f in verify(src).findings} == {RANK, other}


@pytest.mark.parametrize("change", ["values", "manifest"])
def test_file_or_manifest_of_another_save(work, src, change):
    write(work / "other", small_state(2, SHAPES))
    name = RANK if change == "values" else "manifest.json"
    shutil.copy(work / "other" / name, src / name)
    refused(work, 4, "rank-0000", match="another save")
    assert not verify(src)


def test_uncommitted(work, src):
    (src / "manifest.json").unlink()
    refused(work, 3, str(src), match="no committed checkpoint")
    refused(work, 3, str(src), call=lambda work: verify(src))
    refused(work, 3, str(src), call=lambda work: zero1ckpt.open(src))


def test_nothing_there(work):
    refused(work, 3, "src", match="nothing here")
    (work / "src").write_text("x")
    refused(work, 3, "src", match="this is a file")


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"\0" * 50, b"[" * 100_000, b'"\n}\n', b'{"schema": "zero1ckpt.manifest/1"}']
)
def test_manifest_that_is_none(work, src, text):
    (src / "manifest.json").write_bytes(text)
    refused(work, 4, "manifest.json")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("layout", "dp_size"), 10**12),
        (("layout", "param_align"), 2**62),
        (("layout", "bucket_align"), 2**62),
        (("params", 0, "shape"), [2**62, 2**62]),
        (("params", 0, "shape"), [2**62, 1]),
        (("groups", 0), {"$tuple": []}),
    ],
)
def test_forged_manifest_of_impossible_sizes(work, src, place, value):
    """Its digest fits: refused soon and in little memory, before anything is made of the sizes."""
    tree = msgspec.json.decode((src / "manifest.json").read_bytes())
    del tree["manifest_digest"]
    *way, last = place
    inside = tree["parts"][0]
    for step in way:
        inside = inside[step]
    inside[last] = value
    body = msgspec.json.encode(tree)[:-1] + b",\n"
    digest = format_digest(crc64(body)).encode()
    (src / "manifest.json").write_bytes(body + b'"manifest_digest": "' + digest + b'"\n}\n')
    refused(work, 4, "manifest.json")
    refused(work, 4, "manifest.json", call=lambda work: verify(work / "src"))


KINDS = [
    ("bucket_shards", "safetensors"),
    ("fully_sharded_model_space", "safetensors"),
    ("fully_reshardable", "safetensors"),
    ("fully_reshardable", "zarr"),
    ("fully_reshardable", "torch_dist"),
]


@pytest.mark.parametrize(("format", "container"), KINDS)
@pytest.mark.parametrize("shape", [[10**9, 3], [4000, 3], [10**9, 10**4]])
def test_a_forged_shape_is_refused_from_the_listed_sizes(work, format, container, shape, monkeypatch):
    """Nothing is read but the manifest, and nothing made of the size."""
    write(work / "src", format=format, container=container)
    path = work / "src" / "manifest.json"
    manifest = decode_manifest(path.read_bytes(), "m").manifest
    part = manifest.parts[0]
    params = [structs.replace(part.params[0], shape=shape), *part.params[1:]]
    path.write_bytes(encode_manifest(structs.replace(manifest, parts=[structs.replace(part, params=params)])))
    read = []
    real = LocalStore.readv_into
    monkeypatch.setattr(LocalStore, "readv_into", lambda self, key, *rest: (read.append(key), real(self, key, *rest)))
    for call in (lambda work: zero1ckpt.open(work / "src"), lambda work: verify(work / "src"), reshard):
        refused(work, 4, "manifest.json", call=call)
    assert set(read) == {"manifest.json"}


@pytest.mark.parametrize("length", [250, 300, 5000])
def test_names_that_are_too_long(work, src, length):
    name = "q" * length
    refused(work, 6, name, dst=name)
    refused(work, 6, name, dst=name, overwrite=True)
    refused(work, 3, name, call=lambda work: zero1ckpt.open(work / name))
    (work / "latest").write_text(name)
    refused(work, 3, call=lambda work: zero1ckpt.open(work))


def test_run_folder(work, src):
    os.rename(src, work / "step-3")
    (work / "src").mkdir()
    os.rename(work / "step-3", src / "step-3")
    line = refused(work, 3, match="no committed checkpoint here")
    assert "step-3" in line
    (src / "latest").write_text("step-4\n")
    line = refused(work, 3, "latest", "step-4", match="names no committed")
    (src / "latest").write_text("step-3\n")
    assert zero1ckpt.open(src).path == src / "step-3"
    (src / "latest").write_text("../src/step-3")
    refused(work, 3, "latest")


@pytest.mark.parametrize("from_dp", [1, 2, 4])
def test_wrong_from_dp(work, src, from_dp):
    refused(work, 5, str(src), "found 3", f"expected {from_dp}", from_dp=from_dp)


def test_right_from_dp(work, src):
    assert reshard(work, from_dp=3).layout.rules.dp_size == 2


@pytest.mark.parametrize("to_dp", [0, -1, 100_000, True, 2.0, "2"])
def test_dp_that_is_none(work, src, to_dp):
    refused(work, 2, match="dp size", to_dp=to_dp)


@pytest.mark.parametrize("bucket", [0, -5, "x", 1.5, True])
def test_bucket_size_that_is_none(work, src, bucket):
    refused(work, 2, match="bucket size", bucket_size=bucket)


def test_unknown_format_and_container(work, src):
    refused(work, 5, match="did you mean", format="bucket_shard")
    refused(work, 5, match="does not come in this container", container="zarr")


@pytest.mark.parametrize("dst", ["src", "src/inside", ".", "src/../src"])
def test_same_folder(work, src, dst):
    refused(work, 2, match="same folder or lie in each other", dst=dst)


def test_same_folder_by_a_link(work, src):
    (work / "link").symlink_to(src)
    refused(work, 2, match="same folder", dst="link", overwrite=True)


def test_default_destination(work, src):
    made = zero1ckpt.reshard(src, to_dp=5)
    assert made.path == work / "src-dp5" and sorted(p.name for p in work.iterdir()) == ["src", "src-dp5"]


def test_existing_destination(work, src):
    write(work / "dst")
    line = refused(work, 6, str(work / "dst"), match="not empty")
    assert "overwrite" in line
    (work / "dst" / "notes.txt").write_text("mine")
    refused(work, 6, "notes.txt", overwrite=True)
    shutil.rmtree(work / "dst")
    (work / "dst").mkdir()
    (work / "dst" / "notes.txt").write_text("mine")
    refused(work, 6, match="not a zero1ckpt checkpoint", overwrite=True)
    shutil.rmtree(work / "dst")
    (work / "dst").write_text("mine")
    refused(work, 6, match="not a folder", overwrite=True)


def raw(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def broken(data, byte):
    return data[:byte] + bytes([data[byte] ^ (1 << 6)]) + data[byte + 1 :]


def test_damage_is_located_to_file_param_slot_and_elements(work, src):
    """Each flipped value is named by the very elements that it lies in, and those alone."""
    named = 0
    for name in sorted(p.name for p in src.iterdir() if p.name.startswith("rank")):
        size = (src / name).stat().st_size
        for byte in range(size - 1, 4096, -997):
            flip(src / name, byte, 6)
            (finding,) = verify(src, deep=True).findings[:1]
            if finding.kind == "damaged_data":
                low, high = finding.range
                param, slot = finding.param, finding.slot
                assert finding.file == name and param in finding.message and slot in finding.message
                data = (src / name).read_bytes()
                near = data[max(byte - 2000, 0) : byte + 2000]
                inside = raw(STATE[param][slot])[low * 4 : high * 4]
                change = [k for k in range(len(inside)) if near.find(broken(inside, k)) >= 0]
                assert len(change) == 1, "exactly the range that is named was changed, in one byte"
                refused(work, 4, name, param, slot, f"elements {low} to {high}")
                named += 1
            else:
                assert finding.kind == "nonzero_padding"
            flip(src / name, byte, 6)
    assert named > 3


def test_reading_a_whole_damaged_tensor_is_refused_and_another_is_not(work, src):
    checkpoint = zero1ckpt.open(src)
    at = (src / RANK).stat().st_size - 1
    while True:
        flip(src / RANK, at)
        finding = verify(src, deep=True).findings[0]
        if finding.kind == "damaged_data":
            break
        flip(src / RANK, at)
        at -= 1
    # A fresh one, as the header is read before: only data is damaged.
    checkpoint = zero1ckpt.open(src)
    with pytest.raises(zero1ckpt.Zero1CkptError, match="do not match their checksum") as caught:
        checkpoint.read(finding.param, finding.slot)
    assert caught.value.exit_code == 4
    for name, slot in checkpoint.tensors():
        if (name, slot) != (finding.param, finding.slot):
            checkpoint.read(name, slot)


def test_without_verify_the_digest_still_refuses_changed_values(work, src):
    flip(src / RANK, (src / RANK).stat().st_size - 40)
    if not any(f.kind == "damaged_data" for f in verify(src, deep=True).findings):
        flip(src / RANK, 4096 + 4)
    before = tree(work)
    with pytest.raises(zero1ckpt.Zero1CkptError, match="digest") as caught:
        reshard(work, verify=False)
    assert caught.value.exit_code == 4 and tree(work) == before


def test_finite_check(work):
    state = {"w": {"fp32_param": torch.tensor([1.0, float("nan")]), "exp_avg_sq": torch.tensor([0.0, -1.0])}}
    write(work / "src", state)
    assert sorted(f.kind for f in verify(work / "src", deep=True).findings) == ["negative", "nonfinite"]
    assert verify(work / "src").ok
    reshard(work)
    assert zero1ckpt.open(work / "dst").digest == zero1ckpt.open(work / "src").digest


@pytest.mark.parametrize("place", ["extra", "group"])
@pytest.mark.parametrize("drop", [False, True])
def test_a_value_that_refers_to_a_tensor_which_no_file_holds_is_found(work, src, place, drop):
    """``drop``: the file of the tensors is neither there nor listed."""
    path = src / "manifest.json"
    manifest = decode_manifest(path.read_bytes(), "m").manifest
    dangling = {"deep": [{"$tuple": [1, {"$tensor": "gone"}]}, {"$dtype": "float32"}]}
    if place == "extra":
        manifest = structs.replace(manifest, extra={**manifest.extra, **dangling})
    else:
        part = manifest.parts[0]
        manifest = structs.replace(manifest, parts=[structs.replace(part, groups=[{**part.groups[0], **dangling}])])
    if drop:
        (src / "extra.safetensors").unlink()
        files = [entry for entry in manifest.files if entry.path != "extra.safetensors"]
        manifest = structs.replace(manifest, files=files)
    path.write_bytes(encode_manifest(manifest))
    found = [(f.kind, f.param, f.file) for f in verify(src).findings]
    assert ("missing_tensor", "gone", "extra.safetensors") in found and len(found) == 1 + drop
    assert sorted((f.kind, f.param, f.file) for f in verify(src, deep=True).findings) == sorted(found)


def test_unlisted_file_is_a_notice(work, src):
    (src / "notes.txt").write_text("mine")
    answer = verify(src, deep=True)
    assert answer.ok and [f.kind for f in answer.notices] == ["unlisted_file"]
    assert not (reshard(work).path / "notes.txt").exists()


def test_deep_verify_reads_every_payload_byte_once(work, src):
    stored = sum(p.stat().st_size for p in src.iterdir() if p.name.startswith("rank"))
    answer = verify(src, deep=True)
    assert answer.bytes_read == stored - 3 * 4096


# ------------------------------------------------------------------------------------------------------------- output


CODES = {"ENOSPC": errno.ENOSPC, "EDQUOT": errno.EDQUOT, "EIO": errno.EIO}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("verb", ["write", "reshard", "overwrite"])
def test_every_failing_write_leaves_nothing(work, src, code, verb):
    """Every call that writes, flushes, reserves or names, failed in turn."""
    write(work / "old", small_state(2, SHAPES))
    shutil.copytree(work / "old", work / "dst") if verb == "overwrite" else None
    actions = {
        "write": lambda: write(work / "dst"),
        "reshard": lambda: reshard(work),
        "overwrite": lambda: reshard(work, overwrite=True),
    }
    action = actions[verb]
    failing = {"pwrite", "posix_fallocate", "fsync", "rename", "mkdir", "exchange", "ftruncate"}
    before = tree(work)
    descriptors = len(os.listdir("/proc/self/fd"))
    moment = 0
    while True:
        hit = []

        def fail(name, args, moment=moment, hit=hit):
            hit.append(name) if name in failing else None
            if name in failing and len(hit) == moment + 1:
                raise OSError(CODES[code], os.strerror(CODES[code]))

        try:
            with calls(fail):
                action()
        except zero1ckpt.Zero1CkptError as error:
            line = str(error)
            assert error.exit_code == 6 and "\n" not in line and str(work) in line, line
            assert os.strerror(CODES[code]) in line
            if tree(work) != before:  # only the flush of the parent came after the move: it is whole
                assert hit[moment] == "fsync" and verify(work / "dst", deep=True, against=src).ok
                assert sorted(p.name for p in work.iterdir()) == ["dst", "old", "src"]
                shutil.rmtree(work / "dst")
                shutil.copytree(work / "old", work / "dst") if verb == "overwrite" else None
        else:
            if len(hit) <= moment:
                break
            assert hit[moment] in ("mkdir", "fsync"), f"{hit[moment]} failed unnoticed"
            shutil.rmtree(work / "dst")
            shutil.copytree(work / "old", work / "dst") if verb == "overwrite" else None
        moment += 1
    assert moment > 15
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 8, "descriptors are closed"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_folder_that_may_not_be_written(work, src, code):
    def deny(name, args):
        changes = name in ("mkdir", "rename") or (
            name == "open" and args[1:] and args[1] != "r" and isinstance(args[1], int) and args[1] & os.O_CREAT
        )
        if changes:
            raise OSError(code, os.strerror(code))

    with calls(deny):
        line = refused(work, 6, "dst", os.strerror(code))
        refused(work, 6, "dst", os.strerror(code), call=lambda work: write(work / "new" / "dst"))
    assert "choose" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere: the denial is played in the test before")
def test_folder_that_really_may_not_be_written(work, src):
    (work / "closed").mkdir(mode=0o555)
    refused(work, 6, "closed", dst="closed/dst")


def test_no_space_by_the_free_space(work, src, monkeypatch):
    usage = shutil.disk_usage(work)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    refused(work, 6, "dst", match="not enough space")
    refused(work, 6, match="not enough space", call=lambda work: write(work / "dst"))


FULL = """
import os, sys, shutil
import torch
import zero1ckpt
from zero1ckpt.api import commit, resharding, writing
here = sys.argv[1]
state = {"w": {"fp32_param": torch.arange(float(sys.argv[2]))}}
for module in (resharding, writing):
    module.check_space = lambda *args: None
try:
    zero1ckpt.write(here + "/dst", state, dp_size=4)
except zero1ckpt.Zero1CkptError as error:
    print(error.exit_code, sorted(os.listdir(here)), error)
else:
    print(0, sorted(os.listdir(here)))
"""


def test_a_file_system_that_is_really_full(work):
    """A small file system of our own, in a mount namespace of our own."""
    script = work / "full.py"
    script.write_text(FULL)
    place = work / "small"
    place.mkdir()

    def run(count):
        inside = f"mount -t tmpfs -o size=128k none {place} && exec {sys.executable} {script} {place} {count}"
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", inside],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
        if done.returncode:
            pytest.skip(f"no mount namespace here: {done.stderr.strip()[-200:]}")
        return done.stdout

    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    assert run(100).startswith("0 ['dst']")
    out = run(100_000)
    assert out.startswith("6 []") and "No space left on device" in out and "free some space" in out


def test_interrupt_leaves_it_to_resume(work, src):
    class Stop:
        def advance(self, nbytes):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reshard(work, progress=Stop())
    assert not (work / "dst").exists()
    reshard(work, resume=True)
    assert verify(work / "dst", deep=True, against=src).ok
    assert sorted(p.name for p in work.iterdir()) == ["dst", "src"]


def test_source_is_never_written(work, src):
    stamps = {p.name: p.stat().st_mtime_ns for p in src.iterdir()}
    opened = []

    def before(name, args):
        if name == "open" and str(args[0]).startswith(str(src)):
            opened.append(args[1] if len(args) > 1 else "r")

    with calls(before):
        reshard(work)
    assert opened and all(flags == "r" or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) for flags in opened)
    assert stamps == {p.name: p.stat().st_mtime_ns for p in src.iterdir()}
    assert count_calls(lambda: verify(src, deep=True)).count("pwrite") == 0
