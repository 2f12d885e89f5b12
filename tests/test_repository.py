"""The tree keeps the promises of the architecture page: layers, purity, fresh stubs, documents that are true."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from k8s.images import locks
from tests.docs.pages import all_pages, code, everything, read

ROOT = Path(__file__).parents[1]

# Which package may import which. `demo` is a client of nobody and nobody's library: a folder of models and scripts.
MAY_IMPORT: dict[str, set[str]] = {
    "protos": set(),
    "outrider": {"protos"},
    "coordinator": {"outrider", "protos"},
    "draft_worker": {"outrider", "protos"},
    "target_worker": {"outrider", "protos"},
    "demo": {"outrider", "protos"},
    "command_line": {"outrider", "protos", "coordinator", "draft_worker", "target_worker"},
}
# Inside a package: the rooms from the lowest to the highest. A module imports only its own room and lower ones.
ROOMS: dict[str, tuple[str, ...]] = {
    "outrider": (
        *("errors", "visible_text", "message_sizes", "model_files", "buckets", "settings", "addresses"),
        *("concurrency", "audit", "sampling_params"),
        *("local", "security"),
        "objective",
        *("text",),
        "observability",
        *("registry", "canary", "grammar", "hints"),
        *(
            "engine.options",
            "engine.threads",
            "engine.device",
            "engine.chunk_cost",
            "engine.prompt_queue",
            "engine.kv",
            "engine.ranks",
            "engine.compiled",
            "engine.sampling",
            "engine.layers",
        ),
        *(
            "engine.sequence_chunk",
            "engine.rank_messages",
            "engine.device_steps",
            "engine.model",
            "engine.loading",
            "engine.heads",
        ),
        *("engine.profiling", "worker", "hint_service", "engines"),
    ),
    "coordinator": (
        *("formats", "settings", "access", "placement", "models", "intake"),
        *("recovery", "speculation", "workers", "observability"),
        *(
            "output",
            "request",
            "canary",
            "service",
            "batches",
            "api.schema",
            "api.answer",
            "api.responses",
            "api.anthropic",
            "api.grpc",
            "api.batches",
            "api.http",
            "hosting",
            "__main__",
        ),
    ),
    "target_worker": (
        "limits",
        "hints",
        "objectives",
        "messages",
        "admission",
        "core_sharing",
        "scheduling",
        "local_heads",
        "runner",
        "serving",
        "vllm",
        "__main__",
    ),
    "benchmarks": ("shared", "engine", "speculation", "gpu", "sources", "peers", "serving", "scaling", "__main__"),
}
# `outrider simulate` runs the pure cores of the processes in virtual time. Only its command imports it, and only when
# it runs, so that `outrider --help` does not wait for it.
SIMULATOR = "command_line/simulator/"
SIMULATOR_COMMAND = "command_line/simulate/"
# What decision code must not reach for: clocks, sockets, loops, threads, models, global randomness.
IMPURE = {
    "asyncio", "concurrent", "datetime", "grpc", "httpx", "multiprocessing", "ray", "redis", "secrets",
    "selectors", "signal", "socket", "subprocess", "threading", "time", "torch", "transformers", "uuid", "uvloop",
}  # fmt: skip
# Every module that calls itself pure in its docstring is checked; these must do so.
MUST_BE_PURE = {
    "outrider/hints/acceptance.py",
    "outrider/canary/intervals.py",
    "outrider/canary/plan.py",
    "outrider/canary/rule.py",
    "outrider/canary/statistics.py",
    "outrider/hints/confidence.py",
    "outrider/local/child_spec.py",
    "coordinator/speculation/acceptance_watch.py",
    "coordinator/batches/batch.py",
    "coordinator/batches/batch_lines.py",
    "coordinator/batches/validation.py",
    "coordinator/canary/assignment.py",
    "coordinator/speculation/fallback.py",
    "coordinator/speculation/priors.py",
    "coordinator/placement/routing.py",
    "coordinator/request/sequence.py",
    "command_line/start/deployment.py",
    "command_line/start/draft_choice.py",
    "command_line/start/comparison.py",
    "outrider/engine/heads/waves.py",
    "outrider/engine/prompt_queue.py",
    "outrider/hints/hint_tree.py",
    "outrider/hints/hint_wait.py",
    "command_line/simulator/fleet.py",
    "command_line/simulator/models.py",
    "command_line/simulator/traffic.py",
    "target_worker/hints/choices.py",
    "target_worker/hints/neighbour_rows.py",
    "target_worker/scheduling/background_turns.py",
    "target_worker/scheduling/forecast.py",
    "target_worker/scheduling/batch_slots.py",
    "target_worker/scheduling/scheduler.py",
    "target_worker/scheduling/session.py",
    "outrider/hints/speculation.py",
    "outrider/hints/objective_rows.py",
    "outrider/objective.py",
    "target_worker/objectives.py",
}
GENERATED = ("_pb2.py", "_pb2_grpc.py")
# Folders of modules that are no tests.
PRODUCT = (*MAY_IMPORT, "benchmarks", "docs", "k8s")
MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70


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
    permitted = MAY_IMPORT[package] | {package}
    forbidden = set(MAY_IMPORT) - permitted
    assert not {name_of(path): found for path in modules(package) if (found := imports(path) & forbidden)}


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_their_own_and_lower_rooms(package: str) -> None:
    def level(module: str) -> int | None:
        """Position of the room of `package` that has the module."""
        found = [room for room in ROOMS[package] if f"{module}.".startswith(f"{package}.{room}.")]
        return ROOMS[package].index(found[0]) if found else None

    upward = []
    for path in modules(package):
        if path.name == "__init__.py":
            continue
        own = level(name_of(path).removesuffix(".py").replace("/", "."))
        assert own is not None, f"{name_of(path)} belongs to no room of ROOMS"
        names = imported_modules(parsed(path))
        upward += [f"{name_of(path)} imports {name}" for name in sorted(names) if (level(name) or 0) > own]
    assert not upward


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not for the type checker either. A package's `__init__` only passes names on."""
    paths = {
        name_of(path).removesuffix(".py").replace("/", "."): path
        for folder in PRODUCT
        for path in modules(folder)
        if path.name != "__init__.py"
    }
    graph = {name: (imported_modules(parsed(path)) & paths.keys()) - {name} for name, path in paths.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_folder_has_more_than_a_dozen_modules() -> None:
    sizes: dict[str, int] = {}
    for package in (*MAY_IMPORT, "benchmarks"):
        for path in modules(package):
            if path.name != "__init__.py":
                folder = path.parent.relative_to(ROOT).as_posix()
                sizes[folder] = sizes.get(folder, 0) + 1
    assert not {folder: size for folder, size in sizes.items() if size > 12}


def test_no_module_and_no_function_is_too_long_to_read_at_once() -> None:
    paths = [path for folder in PRODUCT for path in modules(folder)]
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert not {name: length for name, length in lengths.items() if length > MODULE_LINES_MAX}
    functions = {
        f"{name_of(path)}: {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in paths
        for node in ast.walk(parsed(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert not {name: length for name, length in functions.items() if length > FUNCTION_LINES_MAX}


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
    processes = ("coordinator.", "draft_worker.", "target_worker.")
    files = {ROOT / f"{name.replace('.', '/')}.py" for name in taken if name.startswith(processes)}
    ours = {path for path in files if path.is_file()}
    assert {"target_worker/scheduling/scheduler.py", "coordinator/placement/routing.py"} <= {
        name_of(path) for path in ours
    }
    assert not [name_of(path) for path in ours if not is_pure(path)]


def test_nobody_imports_the_simulator_but_its_command_when_asked() -> None:
    for package in MAY_IMPORT:
        for path in modules(package):
            if name_of(path).startswith(SIMULATOR):
                continue
            nodes: list[ast.AST] = [parsed(path)]
            # What is imported as the module loads, not in functions or for the type checker.
            if name_of(path).startswith(SIMULATOR_COMMAND):
                nodes = [node for node in parsed(path).body if isinstance(node, (ast.Import, ast.ImportFrom))]
            names = set().union(*(imported_modules(node) for node in nodes), set())
            assert not [name for name in names if name.startswith("command_line.simulator")], name_of(path)


def test_ray_stays_in_the_coordinator_and_in_what_ray_data_runs() -> None:
    packages = set(MAY_IMPORT) - {"coordinator"}
    found = [name_of(path) for package in packages for path in modules(package) if "ray" in imports(path)]
    assert found == ["command_line/batch/ray_data.py"]


def test_torch_stays_out_of_the_coordinator() -> None:
    heavy = {"torch", "transformers", "safetensors"}  # transformers is imported by `outrider.text.chat_template` alone
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
    assert not [node for node in ast.walk(parsed(path)) if isinstance(node, (ast.Await, ast.AsyncFunctionDef))]


@pytest.mark.parametrize(
    "module",
    [
        *(
            "coordinator.api.schema.openai_schema",
            "command_line",
            "outrider.registry.registry",
            "outrider.text.tokenizer",
        ),
        *("command_line.simulator.ratios", "target_worker.scheduling.scheduler", "draft_worker.scheduler"),
    ],
)
def test_light_modules_load_neither_torch_nor_ray(module: str) -> None:
    # By running: an import may be hidden behind one that looks harmless.
    code = f"import sys, {module}; sys.exit(' '.join({{'torch', 'ray', 'transformers'}} & set(sys.modules)) or 0)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
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


def missing_paths(markdown: str) -> list[str]:
    """Paths in backticks that begin in one of our folders, and names of modules, of which there is no file.

    Paths of tests may leave out `tests/`, as those of the threat model do.
    """
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    modules_by_name = {path.name for folder in CODE for path in (ROOT / folder).rglob("*.py")}
    missing = []
    for name in re.findall(r"`([\w.*/-]+)`", markdown):
        if "/" in name and name.partition("/")[0] in folders - {"build", ".cache"}:
            if not any(any(root.glob(name.rstrip("/"))) for root in (ROOT, ROOT / "tests")):
                missing.append(name)
        elif re.fullmatch(r"\w+\.py", name) and name not in modules_by_name:
            missing.append(name)
    return missing


CODE = (*PRODUCT, "tests")


@pytest.mark.parametrize("page", all_pages(), ids=name_of)
def test_folders_and_files_that_the_documents_name_exist(page: Path) -> None:
    assert not missing_paths(page.read_text(encoding="utf-8"))


def test_a_folder_or_file_that_is_gone_is_found() -> None:
    named = [
        "coordinator/request/sequence.py",
        "tests/e2e/chaos/",
        "k8s/dashboards/*.py",
        "a/b.py",
        "README.md",
    ]
    gone = ["coordinator/request_session.py", "protos/outrider/v2/", "no_such_module.py"]
    assert missing_paths(" ".join(f"`{name}`" for name in [*named, *gone])) == gone


def test_folders_that_the_readme_names_exist() -> None:
    readme = read("README.md")
    named = {name.rstrip("/") for name in re.findall(r"`([a-z_.]+(?:/[a-z0-9_.]+)*/)`", readme)}
    assert len(named) >= 6
    assert not [name for name in named if not (ROOT / name).is_dir() and not name.startswith(".cache")]


def test_make_targets_that_the_documents_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(code(everything()))))
    assert {"demo", "test"} <= named <= targets


def test_commands_and_flags_that_the_documents_name_exist() -> None:
    from typer.main import get_command

    from command_line import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    commands |= {
        f"{name} {inner}": each
        for name, group in commands.items()
        for inner, each in getattr(group, "commands", {}).items()
    }
    unknown: list[str] = []
    # A backslash at the end of a line continues the command.
    for text in code(everything()):
        # Not the namespace or the release of that name, in commands of kubectl and helm.
        lines = text.replace("\\\n", " ").splitlines()
        own = "\n".join(line for line in lines if not re.search(r"\b(kubectl|helm) ", line))
        for command, rest in re.findall(r"\boutrider ([a-z-]+)\b([^\n#`|]*)", own):
            if (inner := re.match(r" ([a-z-]+)", rest)) and hasattr(commands.get(command), "commands"):
                command = f"{command} {inner[1]}"
            options = {
                name
                for option in getattr(commands.get(command), "params", [])
                for name in (*option.opts, *option.secondary_opts)
            }
            is_opaque = command in ("target-worker", "draft-worker", "memory-worker", "coordinator")
            flags = [] if is_opaque else re.findall(r"--[a-z-]+", rest)
            unknown += [f"{command} {flag}" for flag in flags if flag not in options | {"--help"}]
            if command not in commands:
                unknown.append(command)
    assert not unknown


def dependencies() -> list[str]:
    """Names of what the processes need, whichever extra brings it."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    required = locks.dependencies(pyproject) + pyproject["project"]["optional-dependencies"]["ray-data"]
    return [re.split(r"[\[<>=;]", requirement)[0] for requirement in required]


def test_every_import_is_a_declared_dependency() -> None:
    # Where the package is not called what it is imported as.
    imported_as = {
        "google": "protobuf", "grpc": "grpcio", "grpc_health": "grpcio-health-checking",
        "grpc_reflection": "grpcio-reflection", "grpc_status": "grpcio-status",
        "huggingface_hub": "huggingface-hub", "jwt": "pyjwt", "opentelemetry": "opentelemetry-sdk",
        "prometheus_client": "prometheus-client", "yaml": "pyyaml",
    }  # fmt: skip
    used = {name for package in MAY_IMPORT for path in modules(package) for name in imports(path)}
    third_party = used - set(sys.stdlib_module_names) - set(MAY_IMPORT) - {"__future__", "grpc_tools"}
    third_party -= {"sglang", "vllm"}  # what `outrider.engines` is installed beside, by whoever runs it
    # Starlette is the part of FastAPI that a few of its types come from.
    assert not {imported_as.get(name, name) for name in third_party} - set(dependencies()) - {"starlette"}


def test_dependencies_are_explained_one_by_one() -> None:
    page = read("docs/development/dependencies.md")
    assert not [name for name in dependencies() if f"`{name}" not in page]


def test_changelog_has_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    from outrider import __version__

    assert __version__ == version


def test_nothing_of_this_machine_is_written_down() -> None:
    # A path below somebody's home, or a package index on somebody's network.
    pattern = re.compile(r"/(?:home|Users|root)/\w+|https?://[^\s\"']*(?:artifactory|nexus|devpi)", re.IGNORECASE)
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
