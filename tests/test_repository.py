"""The tree keeps the promises of the architecture page: layers, purity, fresh stubs, a README that is true."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Who may import whom. `demo` is a client of nobody and nobody's library: a folder of models and their scripts.
MAY_IMPORT: dict[str, set[str]] = {
    "protos": set(),
    "outrider": {"protos"},
    "coordinator": {"outrider", "protos"},
    "draft_worker": {"outrider", "protos"},
    "target_worker": {"outrider", "protos"},
    "demo": {"outrider", "protos"},
}
# A program above all the others, though it lives in `outrider`: it runs their pure cores in virtual time. Nobody
# imports it but its command, and that when it is asked, so that `--help` does not wait.
SIMULATOR = "outrider/simulate/"
SIMULATOR_MAY_IMPORT = {"outrider", "protos", "coordinator", "draft_worker", "target_worker"}
SIMULATOR_COMMAND = "outrider/cli/simulate/"
# What decision code must not reach for: clocks, sockets, loops, threads, models, global randomness.
IMPURE = {
    "asyncio", "concurrent", "datetime", "grpc", "httpx", "multiprocessing", "ray", "redis", "secrets",
    "selectors", "signal", "socket", "subprocess", "threading", "time", "torch", "transformers", "uuid", "uvloop",
}  # fmt: skip
# Every module that calls itself pure in its docstring is checked; these must do so.
MUST_BE_PURE = {
    "outrider/acceptance.py",
    "outrider/canary/intervals.py",
    "outrider/canary/plan.py",
    "outrider/canary/rule.py",
    "outrider/canary/statistics.py",
    "outrider/confidence.py",
    "outrider/child_spec.py",
    "coordinator/acceptance_watch.py",
    "coordinator/canary.py",
    "coordinator/fallback.py",
    "coordinator/priors.py",
    "coordinator/routing.py",
    "outrider/cli/deployment.py",
    "outrider/cli/draft_choice.py",
    "outrider/cli/report.py",
    "outrider/hint_tree.py",
    "outrider/simulate/fleet.py",
    "outrider/simulate/models.py",
    "outrider/simulate/traffic.py",
    "target_worker/forecast.py",
    "target_worker/places.py",
    "target_worker/scheduler.py",
    "target_worker/session.py",
    "target_worker/speculation.py",
    "target_worker/waiting.py",
}
GENERATED = ("_pb2.py", "_pb2_grpc.py")


def modules(package: str) -> Iterator[Path]:
    for path in sorted((ROOT / package).rglob("*.py")):
        if not path.name.endswith(GENERATED):
            yield path


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> set[str]:
    """Top-level names of every absolute import, wherever in the module it stands."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name_of(path)}: relative imports hide the layer they reach into"
            found.add((node.module or "").partition(".")[0])
    return found


def is_pure(path: Path) -> bool:
    return bool(re.search(r"\bPure\b(?! but)", ast.get_docstring(parsed(path)) or ""))


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_what_lies_below(package: str) -> None:
    wrong = {}
    for path in modules(package):
        is_simulator = name_of(path).startswith(SIMULATOR)
        permitted = SIMULATOR_MAY_IMPORT if is_simulator else MAY_IMPORT[package] | {package}
        if found := imports(path) & (set(MAY_IMPORT) - permitted):
            wrong[name_of(path)] = found
    assert not wrong


def imported_modules(tree: ast.AST) -> set[str]:
    """Full names of everything imported below a node."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_simulator_takes_only_what_is_pure_from_the_programs_below_it() -> None:
    taken = set().union(*(imported_modules(parsed(path)) for path in modules(SIMULATOR)))
    files = {ROOT / f"{name.replace('.', '/')}.py" for name in taken if not name.startswith("outrider")}
    ours = {path for path in files if path.is_file()}
    assert {"target_worker/scheduler.py", "coordinator/routing.py"} <= {name_of(path) for path in ours}
    assert not [name_of(path) for path in ours if not is_pure(path)]


def test_nobody_imports_the_simulator_but_its_command_when_asked() -> None:
    for package in MAY_IMPORT:
        for path in modules(package):
            if name_of(path).startswith(SIMULATOR):
                continue
            is_command = name_of(path).startswith(SIMULATOR_COMMAND)
            nodes: list[ast.AST] = [parsed(path)]
            if is_command:  # what is imported as the module loads, not in functions or for the type checker
                nodes = [node for node in parsed(path).body if isinstance(node, (ast.Import, ast.ImportFrom))]
            names = set().union(*(imported_modules(node) for node in nodes), set())
            assert not [name for name in names if name.startswith("outrider.simulate")], name_of(path)


def test_ray_stays_in_the_coordinator() -> None:
    packages = set(MAY_IMPORT) - {"coordinator"}
    assert not [name_of(path) for package in packages for path in modules(package) if "ray" in imports(path)]


def test_torch_stays_out_of_the_coordinator() -> None:
    heavy = {"torch", "transformers", "safetensors"}
    assert not [name_of(path) for path in modules("coordinator") if imports(path) & heavy]


def test_every_module_says_what_it_is() -> None:
    silent = [
        name_of(path)
        for package in MAY_IMPORT
        for path in modules(package)
        if path.read_text(encoding="utf-8").strip() and not ast.get_docstring(parsed(path))
    ]
    assert not silent


def test_decision_code_declares_itself_pure() -> None:
    undeclared = [name for name in MUST_BE_PURE if not is_pure(ROOT / name)]
    assert not undeclared, "the module docstring must contain the word Pure"


@pytest.mark.parametrize(
    "path", [path for package in MAY_IMPORT for path in modules(package) if is_pure(path)], ids=name_of
)
def test_pure_modules_touch_no_clock_socket_loop_or_model(path: Path) -> None:
    assert not imports(path) & IMPURE
    assert not [
        node for node in ast.walk(parsed(path)) if isinstance(node, (ast.Await, ast.AsyncFunctionDef))
    ]


@pytest.mark.parametrize(
    "module",
    [
        *("coordinator.openai_schema", "outrider.cli", "outrider.registry", "outrider.tokenizer"),
        *("outrider.simulate.ratios", "target_worker.scheduler", "draft_worker.scheduler"),
    ],
)
def test_light_modules_load_neither_torch_nor_ray(module: str) -> None:
    # By running: an import may be hidden behind one that looks harmless.
    code = f"import sys, {module}; sys.exit(' '.join({{'torch', 'ray', 'transformers'}} & set(sys.modules)) or 0)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_stubs_are_fresh(tmp_path: Path) -> None:
    from protos.generate import generate

    generate(tmp_path)
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*_pb2*.py*")}
    committed = {path.relative_to(ROOT): path.read_bytes() for path in (ROOT / "protos").rglob("*_pb2*.py*")}
    committed = {name: text for name, text in committed.items() if "__pycache__" not in name.parts}
    assert written.keys() == committed.keys()
    stale = [name.as_posix() for name, text in written.items() if committed[name] != text]
    assert not stale, "run `make stubs`"


def test_every_proto_field_has_a_comment_or_a_telling_block() -> None:
    bare: list[str] = []
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        for block in re.findall(r"^message \w+ \{\n(.*?)^\}", path.read_text(), re.MULTILINE | re.DOTALL):
            # Fields below a comment of their own share it; a block without a single comment says nothing.
            if re.search(r"= \d+", block) and "//" not in block and block.count("= ") > 3:
                bare.append(f"{path.name}: {block.splitlines()[0].strip()}")
    assert not bare


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_folders_that_the_readme_names_exist() -> None:
    named = {name.rstrip("/") for name in re.findall(r"`([a-z_.]+(?:/[a-z0-9_.]+)*/)`", readme())}
    assert len(named) >= 6
    assert not [name for name in named if not (ROOT / name).is_dir() and not name.startswith(".cache")]


def test_make_targets_that_the_readme_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(code_of(readme()))))
    assert {"demo", "test"} <= named <= targets


def test_commands_and_flags_that_the_readme_names_exist() -> None:
    from typer.main import get_command

    from outrider.cli import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    commands |= {
        f"{name} {inner}": each
        for name, group in commands.items()
        for inner, each in getattr(group, "commands", {}).items()
    }
    unknown: list[str] = []
    # A backslash at the end of a line continues the command.
    for code in code_of(readme()):
        for command, rest in re.findall(r"\boutrider ([a-z-]+)\b([^\n#`|]*)", code.replace("\\\n", " ")):
            if (inner := re.match(r" ([a-z-]+)", rest)) and hasattr(commands.get(command), "commands"):
                command = f"{command} {inner[1]}"
            options = {
                name
                for option in getattr(commands.get(command), "params", [])
                for name in (*option.opts, *option.secondary_opts)
            }
            is_opaque = command in ("target-worker", "draft-worker", "coordinator")
            flags = [] if is_opaque else re.findall(r"--[a-z-]+", rest)
            unknown += [f"{command} {flag}" for flag in flags if flag not in options | {"--help"}]
            if command not in commands:
                unknown.append(command)
    assert not unknown


def code_of(markdown: str) -> list[str]:
    """Fenced blocks and inline code."""
    return re.findall(r"```\w*\n(.*?)```", markdown, re.DOTALL) + re.findall(r"`([^`\n]+)`", markdown)


def dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [re.split(r"[\[<>=;]", requirement)[0] for requirement in project["dependencies"]]


def test_every_import_is_a_declared_dependency() -> None:
    # Where the package is not called what it is imported as.
    imported_as = {
        "google": "protobuf", "grpc": "grpcio", "grpc_health": "grpcio-health-checking",
        "grpc_reflection": "grpcio-reflection", "grpc_status": "grpcio-status",
        "opentelemetry": "opentelemetry-sdk", "prometheus_client": "prometheus-client",
    }  # fmt: skip
    used = {name for package in MAY_IMPORT for path in modules(package) for name in imports(path)}
    third_party = used - set(sys.stdlib_module_names) - set(MAY_IMPORT) - {"__future__", "grpc_tools"}
    # Starlette is the part of FastAPI that a few of its types come from.
    assert not {imported_as.get(name, name) for name in third_party} - set(dependencies()) - {"starlette"}


def test_dependencies_are_explained_one_by_one() -> None:
    section = readme().partition("## Dependencies")[2]
    assert not [name for name in dependencies() if f"`{name}" not in section]


def test_changelog_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    from outrider import __version__

    assert __version__ == version


def test_nothing_of_this_machine_is_written_down() -> None:
    # A path below somebody's home, or a package index on somebody's network.
    pattern = re.compile(
        r"/(?:home|Users|root)/\w+|https?://[^\s\"']*(?:artifactory|nexus|devpi)", re.IGNORECASE
    )
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git checkout")
    wrong = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path == Path(__file__) or path.suffix == ".safetensors" or not path.is_file():
            continue
        if pattern.search(path.read_text(encoding="utf-8", errors="replace")):
            wrong.append(name)
    assert not wrong
