"""A comparison as one archive: records, tables and report, with a checksum of each file.

NAME.tar.gz has a folder NAME, and in it SHA256SUMS, which `sha256sum -c` reads. The rows have versions, commit and the
command that made them.
"""

import hashlib
import io
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from harness.records.run_folder import SHARED
from harness.util.files import atomic_write_bytes
from harness.util.text import UserError, one_line

SUFFIX = ".tar.gz"

SUMS = "SHA256SUMS"


def write_bundle(path: Path, name: str, *folders: Path) -> Path:
    """Write the files of a comparison, from its folder and that of its report, and return the path.

    The archive does not say when and by whom it was packed.
    """
    files = {str(file.relative_to(folder)): file for folder in folders for kind in SHARED for file in folder.glob(kind)}
    contents = {place: files[place].read_bytes() for place in sorted(files)}
    contents[SUMS] = "".join(f"{digest(content)}  {place}\n" for place, content in contents.items()).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for place, content in contents.items():
            entry = tarfile.TarInfo(f"{name}/{place}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(path, packed.getvalue())
    return path


@contextmanager
def unpacked(*paths: Path) -> Iterator[list[Path]]:
    """Yield the folders that paths name; a bundle is unpacked for as long as the block runs.

    Raises UserError for a bundle that is damaged or has a file that its checksums do not name.
    """
    with ExitStack() as stack:
        scratch = (Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hs"))) for _ in paths)
        yield [unpack(path, next(scratch)) if path.name.endswith(SUFFIX) else path for path in paths]


def unpack(path: Path, target: Path) -> Path:
    """Unpack a bundle into a folder, and return the folder of its comparison there.

    Raises UserError for one that cannot be read, or that has another file than its checksums name.
    """
    try:
        with tarfile.open(path) as archive:
            files = {entry.name: archive.extractfile(entry) for entry in archive if entry.isfile()}
            contents = {name: file.read() for name, file in files.items() if file is not None}
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise UserError(f"{path} cannot be read as a bundle: {one_line(error)}") from None
    root = next((name.removesuffix(SUMS) for name in contents if name.endswith(f"/{SUMS}")), "")
    lines = contents.pop(f"{root}{SUMS}", b"").decode("utf-8", "replace").splitlines()
    sums = {f"{root}{place}": total for total, _, place in (line.partition("  ") for line in lines)}
    for name in sorted({*contents, *sums}) or [SUMS]:
        if name not in contents or digest(contents[name]) != sums.get(name) or ".." in Path(name).parts:
            raise UserError(f"{path} is damaged: {name} is not what {SUMS} says")
        file = target / name.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(contents[name])
    return target / root.strip("/")


def digest(content: bytes) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()
