"""Chat templates that take too long or too much: each is ended by its steps, which depend on nothing but itself."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import random
import resource
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coordinator.intake.generation_request import GenerationInput
from coordinator.intake.preparation import RequestPreparation
from coordinator.intake.worker_threads import WorkerThreads
from coordinator.settings import CoordinatorSettings
from outrider.errors import ConfigurationError, InvalidRequest
from outrider.text import chat_template, template_limits
from outrider.text.template_limits import STEPS_MAX, BoundedEnvironment, TemplateLimit, at_most
from outrider.text.tokenizer import SHORT_STEPS_MAX, Tokenizer
from tests.coordinator.tiny_model import write_model_dir
from tests.outrider.prompts.folders import write_folder

ROOT = Path(__file__).parents[2]
LIMIT_BYTES = 1 << 30
"""Memory of the process that renders hostile templates: what a replica may have."""
DOUBLED = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
TUPLES = "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
GROWING = "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x, NEW] %}{% endfor %}"
LONG = "{% set x = 'x' * 1000000 %}"
NESTED = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}" + (
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loop without body variables": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "long text in loops": "{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "loop over itself": "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "block that calls itself": "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "text times a number": "{{ 'x' * 1900000000 }}",
    "number times text": "{{ 1900000000 * 'x' }}",
    "list times a number": "{% set x = [1] * 1000000000 %}",
    "sum": DOUBLED.replace("START", "'xx'").replace("STEP", "ns.x + ns.x"),
    "sum of lists": DOUBLED.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
    "tilde": DOUBLED.replace("START", "'xx'").replace("STEP", "ns.x ~ ns.x"),
    "captured": "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "join": DOUBLED.replace("START", "'xx'").replace("STEP", "[ns.x, ns.x] | join"),
    "join of many": LONG + "{{ ','.join([x] * 99999) }}",
    "long separator": LONG + "{{ x.join(['a'] * 99999) }}",
    "long separator, as a filter": LONG + "{{ (['a'] * 99999) | join(x) }}",
    "replace": "{% set x = 'x' * 100000 %}{{ x.replace('x', x) | length }}",
    "replace, as a filter": "{% set x = 'x' * 100000 %}{{ x | replace('x', x) | length }}",
    "replaced nothing": "{% set x = 'x' * 100000 %}{{ x.replace('', x) | length }}",
    "percent": "{{ '%1900000000d' % 1 }}",
    "computed percent": "{{ '%*d' % (1900000000, 1) }}",
    "many percents": LONG + "{{ ('%(a)s' * 10000) % {'a': x} }}",
    "precision": "{{ '%.1900000000f' % 1.5 }}",
    "format": "{{ '{:1900000000}'.format(1) }}",
    "computed format": "{{ '{:{}}'.format(1, 1900000000) }}",
    "many fields": LONG + "{{ ('{0}' * 10000).format(x) }}",
    "format_map": LONG + "{{ ('{a}' * 10000).format_map({'a': x}) }}",
    "format, as a filter": "{{ '%1900000000d' | format(1) }}",
    "ljust": "{{ 'x'.ljust(1900000000) }}",
    "ljust of many": "{% for i in range(99999) %}{% set x = 'x'.ljust(99999) %}{{ x | length }}{% endfor %}",
    "zfill": "{{ 'x'.zfill(1900000000) }}",
    "center": "{{ 'x' | center(1900000000) }}",
    "constant in the template": "{% set x = 'x' | center(1900000000) %}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(99999) | length }}",
    "translate": "{{ ('x' * 100000).translate({120: 'x' * 100000}) | length }}",
    "split": GROWING.replace("NEW", "('x ' * 50000).split()"),
    "split at a letter": GROWING.replace("NEW", "('xy' * 50000).split('y')"),
    "slices": "{% set y = [1] * 99999 %}" + GROWING.replace("NEW", "y[:]"),
    "lists in loops": GROWING.replace("NEW", "[" + "1," * 20_000 + "]"),
    "lists from ranges": GROWING.replace("NEW", "range(99999) | list"),
    "dict.fromkeys": GROWING.replace("NEW", "dict.fromkeys(range(99999))"),
    "batch": "{{ [1] | batch(1900000000, 'x') | list | length }}",
    "slice": "{{ [1] | slice(1900000000, 'x') | list | length }}",
    "indent": "{{ 'x\nx' | indent(1900000000) }}",
    "indent of lines": "{{ ('x\n' * 100000) | indent('y' * 100000) | length }}",
    "tojson": "{{ [1] | tojson(indent=1900000000) }}",
    "tojson of many": LONG + "{{ ([x] * 99999) | tojson }}",
    "tojson of nested": NESTED + "{{ ns.x | tojson }}",
    "tojson with separators": "{{ ([1] * 99999) | tojson(separators=('x' * 1000000, ':')) }}",
    "output of nested": NESTED + "{{ ns.x }}",
    "string of nested": NESTED + "{{ ns.x | string | length }}",
    "comparison of nested": NESTED + "{{ ns.x == ns.y }}",
    "membership of nested": NESTED + "{{ ns.x in [ns.y] }}",
    "test of nested": NESTED + "{{ ns.x is eq(ns.y) }}",
    "selection of nested": NESTED + "{{ [ns.x] | select('eq', ns.y) | list | length }}",
    "index of nested": NESTED + "{{ [ns.x].index(ns.y) }}",
    "sorting of nested": NESTED + "{{ [ns.x, ns.y] | sort | length }}",
    "key of nested": TUPLES + "{{ {ns.x: 1} | length }}",
    "lookup of nested": TUPLES + "{{ {}[ns.x] }}",
    "power": "{{ 9 ** 999999999 }}",
    "products": DOUBLED.replace("START", "3").replace("STEP", "ns.x * ns.x"),
    "words": "{{ lipsum(n=100000000) }}",
    "sum of lists, as a filter": "{{ ([[1] * 99999] * 99999) | sum(start=[]) | length }}",
    "map": LONG + "{{ ([x] * 99999) | map('upper') | list | length }}",
    "chain": "{{ range(99999) | map('string') | map('center', 99999) | list | length }}",
}  # fmt: skip


def render_in_a_child(templates: dict[str, str]) -> dict[str, str]:
    """Renders each template in a process with little memory, and returns the outcomes by name."""
    script = (
        "import json, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({LIMIT_BYTES}, {LIMIT_BYTES}))\n"
        "from outrider.text.template_limits import *\n"
        "from outrider.text.chat_template import _TEMPLATE_ERRORS\n"
        "for name, template in json.load(sys.stdin).items():\n"
        "    try:\n"
        "        with at_most(STEPS_MAX):\n"
        "            text = BoundedEnvironment().from_string(template).render(messages=[])\n"
        "        outcome = f'{len(text)} characters'\n"
        "    except _TEMPLATE_ERRORS as error:\n"
        "        outcome = type(error).__name__\n"
        "    used_s = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    print(json.dumps([name, outcome, used_s.ru_utime + used_s.ru_stime, used_s.ru_maxrss]), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, input=json.dumps(templates), capture_output=True, text=True,
        check=False, timeout=300, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (120, 120)),
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(templates), f"after {lines[-1:]}: {done.returncode} {done.stderr[-500:]}"
    for before, line in zip([None, *lines], lines, strict=False):
        print(line[0], line[1], f"{line[2] - (before[2] if before else 0):.2f} s", line[3] >> 10, "MiB")
    return {name: outcome for name, outcome, *_ in lines}


def test_a_hostile_template_is_ended_whatever_it_does() -> None:
    outcomes = render_in_a_child(HOSTILE)
    wrong = {
        name: outcome
        for name, outcome in outcomes.items()
        if outcome not in ("TemplateLimit", "UndefinedError", "RecursionError", "TemplateAssertionError")
    }
    assert not wrong


def test_text_that_a_template_has_no_bounds_for_is_none() -> None:
    """A bound that is not there is an error, and no template without bounds."""
    with pytest.raises(TemplateLimit, match="without a bound"):
        BoundedEnvironment().from_string("{% for i in [1] %}{{ i }}{% endfor %}").render()


def test_the_same_conversation_takes_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    template = BoundedEnvironment().from_string(
        "{% for m in messages %}{% if loop.first and m.role == 'system' %}{{ m.content | trim }}{% endif %}"
        "<|im_start|>{{ m.role + '\n' + m['content'] }}<|im_end|>\n{% endfor %}"
    )
    taken = set()
    for _ in range(3):
        with at_most(STEPS_MAX):
            template.render(messages=[{"role": "user", "content": "x" * 1024}] * 1024)
            taken.add(template_limits._steps.get().left)
    assert len(taken) == 1
    assert STEPS_MAX - taken.pop() < STEPS_MAX / 10, "the longest prompt, in a thousand messages, is far from the bound"


def test_a_long_text_that_is_split_in_a_few_places_takes_few_steps() -> None:
    """As templates part thoughts from an answer: several times a message, in each of its loops."""
    template = BoundedEnvironment().from_string(
        "{% for i in range(12) %}{% set parts = text.split('</think>') %}{{ parts[-1] | length }}{% endfor %}"
    )
    with at_most(STEPS_MAX):
        template.render(text="thoughts</think>" + "x" * (1 << 20))
        assert STEPS_MAX - template_limits._steps.get().left < STEPS_MAX / 2


def test_a_transformers_that_would_render_without_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is replaced by name. Where that is none of its names any more, nothing else would tell."""
    unbounded = types.SimpleNamespace(environment=ImmutableSandboxedEnvironment())

    class Loader(importlib.abc.Loader):
        def exec_module(self, module: types.ModuleType) -> None:
            module._compile_jinja_template = lambda template: unbounded  # type: ignore[attr-defined]

    spec = importlib.machinery.ModuleSpec("transformers.utils.chat_template_utils", Loader())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(ConfigurationError, match="would have no bounds"):
        chat_template._transformers.__wrapped__()


def with_template(folder: Path, template: str) -> Tokenizer:
    return Tokenizer(
        write_folder(write_model_dir(folder / "plain"), folder / "model", {"chat_template.jinja": template})
    )


def test_a_request_for_which_a_template_does_not_end_is_refused(tmp_path: Path) -> None:
    endless = "{% if 'xyzzy' in messages[0].content %}" + HOSTILE["loops"] + "{% endif %}"
    tokenizer = with_template(tmp_path, endless + "{{ messages[0].content }}")
    tokenizer.study_templates()
    assert tokenizer.render_chat([{"role": "user", "content": "Hello"}]) == "Hello"
    with pytest.raises(InvalidRequest, match="takes too long, or too much memory"):
        tokenizer.render_chat([{"role": "user", "content": "xyzzy"}])


def test_a_template_that_never_ends_is_noticed_when_its_folder_is_loaded(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, HOSTILE["loops"])
    with pytest.raises(ConfigurationError, match="for a conversation of a few words it takes too long"):
        tokenizer.study_templates()


def test_a_short_chat_has_few_steps_on_an_event_loop(tmp_path: Path) -> None:
    """Its template decides, too: what takes more is left to a thread, and renders there."""
    template = "{% for i in range(messages[0].content | int) %}{% endfor %}{{ messages[0].content }}"
    tokenizer = with_template(tmp_path, template)
    few, many = ([{"role": "user", "content": str(number)}] for number in (10, SHORT_STEPS_MAX))
    assert tokenizer.render_short_chat(few) == "10"
    with pytest.raises(TemplateLimit):
        tokenizer.render_short_chat(many)
    assert tokenizer.render_chat(many) == str(SHORT_STEPS_MAX)


async def test_a_chat_whose_template_takes_many_steps_is_rendered_in_a_thread(tmp_path: Path) -> None:
    """On the event loop it was rendered whatever that took, if only its messages were short."""
    template = f"{{% for i in range({SHORT_STEPS_MAX}) %}}{{% endfor %}}{{{{ messages[0].content }}}}"
    tokenizer = with_template(tmp_path, template)
    done_in: list[str] = []
    render = tokenizer.render_chat

    def render_chat(*given: Any, **named: Any) -> str:
        done_in.append(threading.current_thread().name)
        return render(*given, **named)

    tokenizer.render_chat = render_chat  # type: ignore[method-assign]
    threads = WorkerThreads()
    try:
        preparation = RequestPreparation(
            CoordinatorSettings(tokenizer_dir="x", redis_url="redis://x"), random.Random(0), threads
        )
        found = await preparation.tokenize(
            GenerationInput(request_id="r", messages=[{"role": "user", "content": "Hi"}]), tokenizer
        )
    finally:
        threads.close()
    assert found == tokenizer.encode("Hi", add_special_tokens=False)
    assert len(done_in) == 1
    assert done_in[0] != threading.current_thread().name
