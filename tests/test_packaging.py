"""What pyproject.toml, the wheel, .ci/constraints.txt and the two guides promise, held together."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FIVE = ("quantize", "kernels", "calib", "runtime", "evals")
IMPORT_NAMES = {"pyyaml": "yaml"}  # where it is not the distribution's
# of the extra, in its folder alone
IN_THE_SERVER = (
    "fastapi", "starlette", "pydantic", "pydantic_core", "prometheus_client", "uvicorn",
)  # fmt: skip
IN_FUNCTIONS = {  # the folder that may, the extra, and the distribution that brings it
    "matplotlib": ("evals", "evals", "matplotlib"),
    "jsonschema": ("evals", "evals", "jsonschema"),
    "httpx2": ("evals", "evals", "httpx2"),
    "opentelemetry": ("runtime", "otel", "opentelemetry-sdk"),
    "ray": ("runtime", "ray", "ray"),
}
ARRIVES_WITH = {
    "llvmlite": "numba",
    "huggingface_hub": "transformers",
    "tokenizers": "transformers",
    "jinja2": "torch",
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def core(project: dict[str, Any]) -> dict[str, Requirement]:
    return _by_name(project["project"]["dependencies"])


@pytest.fixture(scope="module")
def direct(project: dict[str, Any], core: dict[str, Requirement]) -> dict[str, Requirement]:
    """Every distribution that the core or an extra names, lowbit's own extras aside."""
    extras = project["project"]["optional-dependencies"].values()
    return {**_by_name(r for extra in extras for r in extra), **core}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built from a copy of the sources, as other builds leave files beside them."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for folder in (*FIVE, "tests"):
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(out.glob("lowbit-*.whl"))) as opened:
        yield opened


def _by_name(requirements: Any) -> dict[str, Requirement]:
    parsed = [Requirement(r) for r in requirements]
    return {canonicalize_name(r.name): r for r in parsed if r.name != "lowbit"}


def _sources() -> list[Path]:
    """Every module of the five folders, relative to the root."""
    return sorted(p.relative_to(ROOT) for f in FIVE for p in (ROOT / f).rglob("*.py"))


def test_every_folder_with_code_is_a_listed_package(project: dict[str, Any]) -> None:
    folders = {path.parent.as_posix() for path in _sources()}
    listed = project["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted("lowbit." + f.replace("/", ".") for f in folders)
    missing = [f for f in folders if not (ROOT / f / "__init__.py").is_file()]
    assert not missing, f"no __init__.py in {missing}"


def test_a_package_lies_where_its_name_says(project: dict[str, Any]) -> None:
    tool = project["tool"]["setuptools"]
    expected = {name: name.removeprefix("lowbit.").replace(".", "/") for name in tool["packages"]}
    assert tool["package-dir"] == expected


def test_the_wheel_holds_the_five_folders_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    code = {n for n in wheel.namelist() if not n.startswith("lowbit-")}
    sources = {f"lowbit/{path.as_posix()}" for path in _sources()}
    data = {"runtime/server/page.html", "evals/semantic_added.txt", "evals/semantic_prompts.txt"}
    assert code == sources | {f"lowbit/{path}" for path in data}
    # Without an __init__.py lowbit stays a namespace, as in an editable install.
    assert "lowbit/__init__.py" not in code


def test_the_wheel_says_what_the_project_says(
    wheel: zipfile.ZipFile, project: dict[str, Any]
) -> None:
    version = project["project"]["version"]
    info = f"lowbit-{version}.dist-info"
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "quantize = lowbit.quantize.cli:main" in entry_points
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {version}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


def test_the_installed_version_is_the_projects(project: dict[str, Any]) -> None:
    assert importlib.metadata.version("lowbit") == project["project"]["version"]


def test_constraints_pin_every_direct_dependency(direct: dict[str, Requirement]) -> None:
    lines = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    names = [canonicalize_name(pin.name) for pin in pins]
    assert names == sorted(direct), "one pin for each, in alphabetical order"
    for pin in pins:
        (pinned,) = pin.specifier
        assert pinned.operator == "==" and "*" not in pinned.version, f"{pin} is no exact version"
        allowed = direct[canonicalize_name(pin.name)].specifier
        assert pinned.version in allowed, f"{pin}, but pyproject.toml says {allowed}"


def test_every_import_is_of_a_core_dependency(core: dict[str, Requirement]) -> None:
    """Or of what one of them requires: nothing is found by luck. (evals/peers.py and
    serving_engines.py run in the Python of the tool that they drive.)"""
    known = {IMPORT_NAMES.get(name, name) for name in core} | set(ARRIVES_WITH)
    for path in _sources():
        if path.name in ("peers.py", "serving_engines.py"):
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules = [node.module or ""]
            for top in (module.partition(".")[0] for module in modules):
                if path.parts[:2] == ("runtime", "server") and top in IN_THE_SERVER:
                    continue
                folder, *_ = IN_FUNCTIONS.get(top, ("",))
                if folder == path.parts[0] and node.col_offset:
                    continue
                assert top in known or top in sys.stdlib_module_names, f"{path} imports {top}"


def test_what_functions_import_is_of_the_extra(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    for _, extra, distribution in IN_FUNCTIONS.values():
        assert distribution in _by_name(extras[extra])
    brought = {"starlette", "pydantic-core"}  # by fastapi and by pydantic
    serve = {*_by_name(extras["serve"]), *brought}
    assert {canonicalize_name(name) for name in IN_THE_SERVER} <= serve


@pytest.mark.parametrize("name", ARRIVES_WITH)
def test_what_arrives_with_a_core_dependency_does(name: str, core: dict[str, Requirement]) -> None:
    parent = ARRIVES_WITH[name]
    assert parent in core
    required = [Requirement(r) for r in importlib.metadata.requires(parent) or []]
    names = {canonicalize_name(r.name) for r in required if r.marker is None}
    assert canonicalize_name(name) in names


def test_each_core_dependency_is_justified(core: dict[str, Requirement]) -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    section = guide.partition("## Dependencies\n")[2].partition("\n## ")[0]
    reasons = dict(re.findall(r"^- `([\w-]+)`: (\S.{20,})$", section, re.MULTILINE))
    assert sorted(reasons) == sorted(core)


def test_the_readme_shows_every_command_as_it_is() -> None:
    from lowbit.quantize.cli.app import app
    from typer.main import get_command

    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    shown = _commands_in((ROOT / "README.md").read_text())
    assert {name for name, _ in shown} == set(commands)
    for name, options in shown:
        known = {o for p in commands[name].params for o in (*p.opts, *p.secondary_opts)}
        unknown = set(options) - known - {"--help", "-h"}
        assert not unknown, f"README: quantize {name} has no option {', '.join(unknown)}"


def _commands_in(markdown: str) -> list[tuple[str, list[str]]]:
    """(subcommand, options) of every `quantize ...` line that its code blocks ask one to type."""
    blocks = re.findall(r"^```sh\n(.*?)^```", markdown, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    typed = [part.split() for line in lines for part in line.split("&&")]
    return [
        (words[1], [w for w in words if re.fullmatch(r"-\w|--[\w-]+", w)])
        for words in typed
        if words[:1] == ["quantize"]
    ]


def test_the_readme_maps_the_folders_in_the_order_of_the_data() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \|", readme, re.MULTILINE)
    assert rows == ["kernels", "calib", "quantize", "runtime", "evals", "tests"]


def test_ci_is_a_script_that_bash_can_read() -> None:
    done = subprocess.run(["bash", "-n", ROOT / ".ci/run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
