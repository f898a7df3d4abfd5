"""Which room may look into which, enforced; and what no file of the repository may be or contain."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"hisparse": ROOT / "python/hisparse", "hisparse_kernel": ROOT / "sgl-kernel/hisparse_kernel"}
MAX_LINES = 450

LEAVES = {"config", "row_format", "hook_row", "device", "trace_format", "link", "side_stream"}
"""Modules that import nothing of ours, and that anyone may import, like `budget`."""

SHARED = LEAVES | {"budget"}

OBSERVERS = {"recorder", "trace_writer", "swap_in_timer"}
"""What watches swap-in without changing it."""

MAY_IMPORT: dict[str, set[str]] = {
    **{leaf: set() for leaf in LEAVES},
    "budget": {"config"},
    "plotting": {"config"},
    "extend_plan": set(),
    "hisparse_kernel": {"row_format"},
    "memory": SHARED | {"hisparse_kernel"},
    "workspace": {"hisparse_kernel", "memory", "extend_plan", "side_stream"},
    "trace_writer": {"trace_format"},
    "recorder": {"trace_writer"},
    "swap_in_timer": set(),
    "coordinator": SHARED | OBSERVERS | {"hisparse_kernel", "memory", "extend_plan", "workspace"},
    "plugin": SHARED | OBSERVERS | {"hisparse_kernel", "memory", "extend_plan", "coordinator", "cpu"},
    "cpu": {"hook_row", "device"},
    "planner": {"config", "row_format", "budget", "link", "plotting"},
    "simulator": {"config", "row_format", "trace_format", "link", "plotting"},
}
"""The arrows. A room that is not named here may import any of ours (the command line and what it starts)."""

MAY_IMPORT_SGLANG = {"plugin", "cpu"}


def our_files() -> list[Path]:
    return sorted(path for folder in PACKAGES.values() for path in folder.rglob("*.py"))


def room_of(path: Path) -> str:
    """The module or folder below `hisparse`, or `hisparse_kernel`."""
    for package, folder in PACKAGES.items():
        if path.is_relative_to(folder):
            return package if package == "hisparse_kernel" else path.relative_to(folder).parts[0].removesuffix(".py")
    raise AssertionError(f"{path} is in no package")


def imported_modules(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names, imports inside functions included; `from a import b` gives `a.b`, since b may be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: -(node.level - 1) or None]
                base = ".".join([*above, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            assert node.args and isinstance(node.args[0], ast.Constant), "an import that cannot be checked"
            yield str(node.args[0].value)


def imports_of(path: Path) -> set[str]:
    package = path.relative_to(ROOT).parent.as_posix().removeprefix("python/").removeprefix("sgl-kernel/")
    return set(imported_modules(ast.parse(path.read_text()), package.replace("/", ".")))


def rooms_imported_by(path: Path) -> set[str]:
    rooms = set()
    for name in imports_of(path):
        top, *rest = name.split(".")
        if top == "hisparse_kernel":
            rooms.add(top)
        elif top == "hisparse":
            assert rest, f"{path} imports all of hisparse"
            rooms.add(rest[0])
    return rooms - {room_of(path)}


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.fail("not a git checkout: the repository's own files cannot be told from others")
    names = [name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in (ROOT / name for name in names) if path.is_file()]


def text_files() -> Iterator[tuple[Path, str]]:
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" not in content[:8192]:
            yield path.relative_to(ROOT), content.decode(errors="replace")


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_a_room_imports_only_what_its_arrows_allow(room: str) -> None:
    for path in our_files():
        if room_of(path) == room:
            illegal = rooms_imported_by(path) - MAY_IMPORT[room]
            assert not illegal, f"{path.relative_to(ROOT)} must not import {sorted(illegal)}"


def test_only_two_rooms_import_sglang() -> None:
    for path in our_files():
        if "shims" in path.parts:
            continue
        tops = {name.split(".")[0] for name in imports_of(path)}
        assert room_of(path) in MAY_IMPORT_SGLANG or "sglang" not in tops, path


def test_the_plugin_and_the_coordinator_are_imported_by_few() -> None:
    """Nothing below the coordinator knows it, and only the command line knows the plug-in."""
    for path in our_files():
        rooms = rooms_imported_by(path)
        if "plugin" in rooms:
            assert room_of(path) not in MAY_IMPORT, path
        if "coordinator" in rooms:
            assert room_of(path) == "plugin", path


def test_the_product_imports_no_tests() -> None:
    test_modules = {path.stem for path in (ROOT / "test").rglob("*.py")} - {"__init__"}
    product = [*our_files(), *(ROOT / "benchmark").rglob("*.py")]
    for path in product:
        for name in imports_of(path):
            assert name.split(".")[0] not in {"test", "tests", "conftest", "pytest", "hypothesis"}, f"{path}: {name}"
    for path in our_files():
        tops = {name.split(".")[0] for name in imports_of(path)}
        assert not tops & test_modules, f"{path} imports {tops & test_modules}"


def test_the_rooms_exist() -> None:
    """A renamed room must not slip out of the arrows."""
    rooms = {room_of(path) for path in our_files()}
    assert set(MAY_IMPORT) - rooms <= {"planner", "simulator"}


def test_every_file_of_a_package_is_distributed() -> None:
    """A wheel holds the modules of the listed packages, and what package-data names; it works like the checkout."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages, package_data = set(setuptools["packages"]), setuptools["package-data"]
    for path in tracked_files():
        for package, folder in PACKAGES.items():
            if not path.is_relative_to(folder):
                continue
            parts = [package, *path.relative_to(folder).parent.parts]
            in_package = path.suffix == ".py" and ".".join(parts) in packages
            assert in_package or is_package_data(path, folder, parts, packages, package_data), (
                f"{path.relative_to(ROOT)} is in no wheel: pyproject.toml lists neither its package nor the file"
            )


def is_package_data(
    path: Path, folder: Path, parts: list[str], packages: set[str], package_data: dict[str, list[str]]
) -> bool:
    for depth in range(len(parts), 0, -1):
        name = ".".join(parts[:depth])
        if name in packages:
            inside = path.relative_to(folder.joinpath(*parts[1:depth])).as_posix()
            patterns = [*package_data.get("*", ()), *package_data.get(name, ())]
            if any(glob_matches(inside, pattern) for pattern in patterns):
                return True
    return False


def glob_matches(name: str, pattern: str) -> bool:
    """As setuptools' glob: `*` stays inside a folder, `**` is any number of folders."""
    parts = [r"(?:[^/]+/)*" if part == "**" else fnmatch_part(part) + "/" for part in pattern.split("/")]
    return re.fullmatch("".join(parts).removesuffix("/"), name) is not None


def fnmatch_part(part: str) -> str:
    return "".join("[^/]*" if char == "*" else re.escape(char) for char in part)


def test_no_file_is_long() -> None:
    for path, text in text_files():
        if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp", ".sh", ".toml"):
            lines = text.count("\n")
            assert lines <= MAX_LINES, f"{path} has {lines} lines, more than {MAX_LINES}"


MACHINE_PATHS = re.compile(
    r"(?<![\w./~$}-])/(?:home|root|work|Users|mnt|workspace|scratch)/[\w.-]+|(?<![\w./~$}-])/tmp/[\w.-]|[A-Z]:\\Users"
)


def test_no_path_of_a_machine_is_in_the_repository() -> None:
    this_file = Path(__file__).relative_to(ROOT)
    for path, text in text_files():
        if path == this_file:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            found = MACHINE_PATHS.search(line)
            assert found is None, f"{path}:{number} has the path {found.group()}"  # type: ignore[union-attr]


@pytest.mark.parametrize("line", ("/home/me/model", 'open("/root/x")', "=/tmp/cache", "(/Users/x)", r"C:\Users\x"))
def test_such_paths_are_recognised(line: str) -> None:
    assert MACHINE_PATHS.search(line)


@pytest.mark.parametrize(
    "line",
    ("/sys/fs/cgroup", "a/home/b", "https://host/home/x", "$HOME/home/x", "tmp/x", "/tmp", "~/home/x", "/v1/models"),
)
def test_other_paths_are_not(line: str) -> None:
    assert not MACHINE_PATHS.search(line)


def test_the_checks_see_every_kind_of_import() -> None:
    source = """
import hisparse.config
from hisparse import memory
from . import budget
from ..hisparse_kernel import swap_in
def f():
    from sglang.srt import utils
    importlib.import_module("sglang.srt.server_args")
"""
    assert set(imported_modules(ast.parse(source), "a.b")) == {
        "hisparse.config",
        "hisparse.memory",
        "a.b.budget",
        "a.hisparse_kernel.swap_in",
        "sglang.srt.utils",
        "sglang.srt.server_args",
    }
