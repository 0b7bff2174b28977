"""Checks what is in a built wheel and sdist: `python tools/check_distributions.py dist`."""

import re
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).parent.parent


def modules(root: Path = ROOT) -> set[str]:
    """The package's files, as a wheel names them."""
    source = root / "src"
    files = [p for p in source.rglob("*") if p.suffix == ".py" or p.name == "py.typed"]
    return {p.relative_to(source).as_posix() for p in files}


def wheel_faults(names: set[str], expected: set[str]) -> list[str]:
    """What is wrong with a wheel of files with these names."""
    info = {n for n in names if n.split("/")[0].endswith(".dist-info")}
    faults = [f"the wheel lacks {name}" for name in sorted({*expected, "jmp_policy/py.typed"} - names)]
    faults += [f"the wheel has {name}" for name in sorted(names - expected - info)]
    if not any(name.endswith("/LICENSE") for name in info):
        faults.append("the wheel lacks the licence")
    return faults


def metadata_faults(text: str) -> list[str]:
    """What is wrong with the metadata of a wheel: links of the README that lead nowhere, or no README."""
    message = message_from_string(text)
    prose = re.sub(r"^```.*?^```$", "", message.get_payload(), flags=re.S | re.M)
    links = re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", prose)
    faults = [f"the README of the wheel links to {link}" for link in links]
    if message["Description-Content-Type"] != "text/markdown" or len(message.get_payload()) < 1000:
        faults.append("the wheel lacks the README")
    return faults


def sdist_faults(names: set[str], expected: set[str]) -> list[str]:
    """What is wrong with an sdist of files with these names, below its one folder."""
    files = {name.partition("/")[2] for name in names}
    return [f"the sdist lacks {name}" for name in sorted(expected - files)]


def expected_in_sdist(root: Path = ROOT) -> set[str]:
    """The package, and everything that its tests, documentation and benchmarks are made with."""
    files = {f"src/{name}" for name in modules(root)}
    files |= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE"}
    files |= {"CODE_OF_CONDUCT.md", "SECURITY.md"}
    files |= {"Makefile", "mkdocs.yml", "pyproject.toml", ".ci/run", ".pre-commit-config.yaml"}
    files |= {"hatch_build.py"}
    kinds = {".py", ".md", ".ipynb", ".json", ".npz", ".css", ".js", ".svg", ".png", ".yml", ".txt"}
    for folder in ("tests", "docs", "examples", "notebooks", "benchmarks", "tools", ".github"):
        paths = (p.relative_to(root) for p in (root / folder).rglob("*") if p.suffix in kinds)
        files |= {p.as_posix() for p in paths if "out" not in p.parts and "__pycache__" not in p.parts}
    return files


def main(folder: Path) -> None:
    """Raises SystemExit with the faults; prints a line when there are none."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
        metadata = next(name for name in in_wheel if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        version = message_from_string(text)["Version"]
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name for member in archive.getmembers() if member.isfile()}
    faults = (
        metadata_faults(text)
        + wheel_faults(in_wheel, modules())
        + sdist_faults(in_sdist, expected_in_sdist())
    )
    faults += [f"{p.name} is not of version {version}" for p in (wheel, sdist) if f"-{version}" not in p.name]
    if faults:
        raise SystemExit("\n".join(faults))
    print(f"{wheel.name}: {len(in_wheel)} files; {sdist.name}: {len(in_sdist)} files")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
