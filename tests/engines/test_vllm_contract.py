"""The installed vLLM has what the scheduler relies on; a release that moves some of it fails here, by name."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from outrider.engines.vllm.plugin import SCHEDULER
from tests.engines.vllm_server import PYTHON, ROOT, TARGET, environment, needs_vllm

pytestmark = [needs_vllm, pytest.mark.long, pytest.mark.timeout(600)]


def said_by_vllm(code: str, **variables: str) -> str:
    """The last line that code prints in vLLM's environment."""
    words = [PYTHON, "-c", code]
    variables = {**environment(), **variables}
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_nothing_that_is_relied_on_has_moved() -> None:
    assert said_by_vllm("from outrider.engines.vllm.contract import missing; print(list(missing()))") == "[]"
    code = "from outrider.engines.vllm.contract import *; print(list(missing(SESSION_METHODS, SESSION_SOURCES)))"
    assert said_by_vllm(code) == "[]"


def test_the_release_is_one_that_is_said_to_be_tested() -> None:
    code = "import vllm; from outrider.engines.vllm.checks import check_version; check_version(vllm.__version__, {})"
    assert said_by_vllm(f"{code}; print('ok')") == "ok"


def test_the_scheduler_overrides_methods_that_vllm_has_and_no_others() -> None:
    """A method of vLLM's that is renamed would leave its override without effect."""
    code = """
from vllm.v1.core.sched.scheduler import Scheduler
from outrider.engines.vllm.scheduler import HintScheduler
own = {name for name in vars(HintScheduler) if not name.startswith(('__', '_abc'))}
print(sorted(name for name in own if hasattr(Scheduler, name)))
"""
    assert said_by_vllm(code) == str(
        ["_free_request", "add_request", "schedule", "shutdown", "update_draft_token_ids", "update_from_output"]
    )


def test_vllm_accepts_the_proposer() -> None:
    code = """
from types import SimpleNamespace
from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer
from outrider.engines.vllm.checks import PROPOSER
speculative = SimpleNamespace(model=PROPOSER, num_speculative_tokens=7)
print(create_custom_proposer(SimpleNamespace(speculative_config=speculative)).propose([[1], []]))
"""
    assert said_by_vllm(code) == "[[], []]"


def test_one_variable_is_enough_where_the_package_is_installed(tmp_path: Path) -> None:
    """The entry point of `pyproject.toml`, found as vLLM finds it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / "made_by_a_test-1.dist-info"  # another name, so that no stale one of ours hides it
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: made-by-a-test\nVersion: 1\n")
    points = project["entry-points"]["vllm.general_plugins"]
    (metadata / "entry_points.txt").write_text(
        "\n".join(["[vllm.general_plugins]", *(f"{name} = {value}" for name, value in points.items())])
    )
    code = f"""
from vllm.engine.arg_utils import AsyncEngineArgs
config = AsyncEngineArgs(model={str(TARGET)!r}, max_model_len=256).create_engine_config()
from outrider.engines.vllm.checks import check_configuration, settings_in
check_configuration(config)
print(config.scheduler_config.scheduler_cls, settings_in(config), config.speculative_config.num_speculative_tokens)
"""
    path = f"{tmp_path}:{ROOT}"
    hints = '{"draft_workers": ["a:1"], "num_speculative_tokens": 5}'
    said = said_by_vllm(code, PYTHONPATH=path, OUTRIDER_HINTS=hints)
    assert said == f"{SCHEDULER} {{'draft_workers': ['a:1']}} 5"


def test_the_sampler_of_a_cpu_needs_mending_and_is_mended() -> None:
    """If nothing is found at first, vLLM has mended its sampler or runs with Triton: `cpu_sampler` can go."""
    code = """
from vllm.platforms import current_platform
current_platform.import_kernels()
current_platform.register_triton_kernel_overrides()
from outrider.engines.vllm import cpu_sampler
before = list(cpu_sampler.faults())
cpu_sampler.mend_sampler()
print([before == [cpu_sampler.EXPAND, cpu_sampler.TOP_K], list(cpu_sampler.faults())])
"""
    assert said_by_vllm(code) == "[True, []]"


def test_the_kernels_of_a_cpu_judge_hints_as_those_of_a_gpu_do() -> None:
    """Both get the same random numbers; Triton's interpreter runs the latter. So what tests on a CPU say about
    distributions holds for the other kernels."""
    assert said_by_vllm("from tests.engines import sampler_kernels; print(sampler_kernels.differences())") == "[]"
