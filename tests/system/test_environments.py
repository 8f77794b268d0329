"""A sweep in the environments that people have: it comes to the usual table, or says what is in its way."""

import errno
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.commands import read_rows, run_harness
from tests.support.folder_invariants import differences, litter
from tests.support.processes import ROOT, TINY, seconds_until_gone, start

pytestmark = pytest.mark.long

SWEEP = ("strategy=ddp,tp", "proof.reference=false", "preflight=false")

PATIENCE_SECONDS = 15.0  # in which processes of a command that has ended are gone


@dataclass(frozen=True)
class Environment:
    """What surrounds a command: its shell, its variables, its folder; and the reason if it cannot run there."""

    shell: str = ""  # what a shell does before it becomes the command
    variables: Mapping[str, str] = field(default_factory=dict)
    folder: str = "results"
    reason: str = ""  # of both rows


def no_flock(number: int) -> Environment:
    folder = {"NO_FLOCK_FOLDER": "{results}", "NO_FLOCK_ERRNO": str(number)}
    return Environment(variables={"LD_PRELOAD": "{library}"} | folder)


ENVIRONMENTS = {
    "SIGTERM ignored": Environment('trap "" TERM'),
    "SIGINT and SIGHUP ignored": Environment('trap "" INT HUP'),
    "no input": Environment("exec <&-"),
    "no outputs": Environment("exec >&- 2>&-"),
    "few open files": Environment("ulimit -n 24", reason="need 48 open files, and `ulimit -n` is 24"),
    "just enough open files": Environment("ulimit -n 48"),
    "no core files": Environment("ulimit -c 0"),
    "a small stack": Environment("ulimit -s 1024"),
    "files of at most 16 MiB": Environment("ulimit -f 32768"),
    "readable by the user alone": Environment("umask 077"),
    "ENOSYS of flock": no_flock(errno.ENOSYS),
    "ENOLCK of flock": no_flock(errno.ENOLCK),
    "EOPNOTSUPP of flock": no_flock(errno.EOPNOTSUPP),
    "no home": Environment("unset HOME"),
    "a home that does not exist": Environment(variables={"HOME": "/nonexistent"}),
    "the C locale": Environment(variables={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "a narrow, dumb terminal": Environment(variables={"COLUMNS": "1", "TERM": "dumb"}),
    "optimized Python": Environment(variables={"PYTHONOPTIMIZE": "2"}),
    "threads of OpenMP": Environment(variables={"OMP_NUM_THREADS": "7", "MKL_NUM_THREADS": "3"}),
    "a proxy": Environment(variables={"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}),
    "variables of another launcher": Environment(variables={"LOCAL_RANK": "3", "MASTER_ADDR": "192.0.2.1"}),
    "no GPU to be seen": Environment(variables={"CUDA_VISIBLE_DEVICES": ""}),
    "a link": Environment(folder="link"),
}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calm")
    assert run_harness(folder, "-m", "name=sweep", *SWEEP, *TINY).returncode == 0
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if sys.platform != "linux":
        pytest.skip("flock is put elsewhere by the dynamic linker of Linux")
    path = tmp_path_factory.mktemp("library") / "no_flock.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", path, ROOT / "tests/support/no_flock.c", "-ldl"], check=True)
    return path


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_sweep_comes_to_its_table_or_says_why_not(name: str, tmp_path: Path, calm: Path, library: Path) -> None:
    environment = ENVIRONMENTS[name]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    temporary = Path(tempfile.mkdtemp())  # whose path is short enough for sockets
    results = tmp_path / environment.folder
    places = {"library": library, "results": results}
    variables = {key: text.format(**places) for key, text in environment.variables.items()}
    before = ("sh", "-c", f'{environment.shell or ":"}; exec "$@"', "sh")
    command = start(results, SWEEP, {"TMPDIR": str(temporary)} | variables, before)
    status, output = command.wait(), command.output()
    _, left = seconds_until_gone(command, PATIENCE_SECONDS)
    assert left == [] and "Traceback" not in output
    if environment.reason:
        rows = read_rows(results, "sweep")
        assert status == 1 and len(rows) == 2, output
        assert all(environment.reason in reason for reason in rows.reason), list(rows.reason)
    else:
        assert status == 0, output
        assert differences(results, calm) == [], output
    assert litter(results) == [] == [path.name for path in temporary.iterdir()]
    shutil.rmtree(temporary)
