"""Measures how many tokens a step commits with a memory worker, beside lookup alone, where a fleet repeats itself.

Two workloads: rollouts, several samples of each prompt, which the target generates first; and an agent loop, several
attempts at one task whose turns rewrite a file of the standard library with a few edits, each prompt holding all turns
before. Recorded tokens are replayed on two targets: real schedulers of targets and of a memory worker exchange hints
and commits, and only the model is replaced by what it generated. Hints arrive before the next step, or with --late one
step later. Nobody is faster for what nobody has generated yet: requests that start together and generate the same gain
nothing, so they start some steps apart. The memory's own time is processor time of its thread per committed token.

The draft worker of two arms is no model: it hints at the next tokens, each of which is right with a given probability
as long as those before it are. What a draft model of that acceptance would add to a memory, and a memory to it, is a
matter of these figures alone.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.shared.machine import machine
from benchmarks.shared.options import load, parser_of, report, say, target_model
from demo.corpus import held_out_files, held_out_prompts
from draft_worker import messages as draft_messages
from draft_worker.memory.options import MemoryLimits
from draft_worker.memory.scheduler import MemoryScheduler
from outrider.engine.kv.kv_cache import BlockAllocator
from outrider.engine.sampling.verification import Verdict
from outrider.hints.hint_tree import Hint
from outrider.sampling_params import SamplingParams, SpeculationSettings
from outrider.text.tokenizer import Tokenizer
from target_worker import messages as target_messages
from target_worker.limits import SchedulerLimits
from target_worker.scheduling.scheduler import Scheduler

NUM_TARGETS = 2
STEP_S = 0.01
EDITED_SHARE = 0.05  # of a file's lines, in every turn of every attempt
OWN_SHARE = 0.02  # of its lines, edited in one attempt alone
LOOKUP, RECENT, MEMORY = "lookup", "lookup with recent outputs", "lookup and memory"
DRAFT, BOTH = "lookup and draft", "lookup, draft and memory"
DRAFT_STREAM, MEMORY_STREAM = 1, 2
ToTarget = target_messages.SubscribeDraft | target_messages.HintsArrived
WRONG = 0  # a token that a draft hints at where it is wrong


@dataclass(frozen=True, slots=True)
class Arm:
    """Sources of hints beside lookup in the session's own tokens."""

    recent_tokens: int = 0  # of recent outputs, which each target keeps
    has_memory: bool = False
    has_draft: bool = False


ARMS = {
    LOOKUP: Arm(),
    RECENT: Arm(recent_tokens=65536),
    MEMORY: Arm(has_memory=True),
    DRAFT: Arm(has_draft=True),
    BOTH: Arm(has_memory=True, has_draft=True),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """A request and what was generated for it."""

    prompt: list[int]
    output: list[int]


@dataclass(frozen=True, slots=True)
class Client:
    """Requests that follow each other, the first one at a step of the fleet."""

    turns: list[Turn]
    starts_at: int


@dataclass(slots=True)
class Replay:
    """A fleet of two targets on which recorded requests run."""

    clients: Sequence[Client]
    num_speculative_tokens: int
    arm: Arm
    draft_rate: float = 0.7  # probability that a hint of the draft worker is right, if those before it are
    is_late: bool = False
    num_steps: int = 0  # of sessions, those of a prompt not counted
    num_tokens: int = 0
    memory_s: float = 0.0
    now: float = 0.0
    _targets: list[Scheduler] = field(init=False)
    _memory: MemoryScheduler = field(default_factory=lambda: MemoryScheduler(MemoryLimits()))
    _running: dict[str, tuple[int, Turn, list[int]]] = field(default_factory=dict)  # target, turn, generated so far
    _on_the_way: list[tuple[int, ToTarget]] = field(default_factory=list)  # to a target
    _luck: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        longest = max(len(turn.prompt) + len(turn.output) for client in self.clients for turn in client.turns)
        limits = SchedulerLimits(
            max_num_seqs=len(self.clients),
            max_model_len=longest + 1,
            num_speculative_tokens=self.num_speculative_tokens,
            max_lookup_tokens=self.arm.recent_tokens,
            may_pause=False,
            hint_wait_ms_max=0.0,
        )
        num_blocks = len(self.clients) * (longest // 16 + 2) + 1
        vocab_size = 1 << 20
        self._targets = [Scheduler(limits, BlockAllocator(num_blocks, 16), vocab_size) for _ in range(NUM_TARGETS)]

    def run(self) -> None:
        """Runs all requests to their end."""
        left = [list(client.turns) for client in self.clients]
        step = 0
        while self._running or any(left):
            for number, (client, turns) in enumerate(zip(self.clients, left, strict=True)):
                is_free = not any(name.startswith(f"{number} ") for name in self._running)
                if turns and is_free and step >= client.starts_at:
                    self._start(f"{number} {len(turns)}", number % NUM_TARGETS, turns.pop(0))
            late, self._on_the_way = self._on_the_way, []
            if not self.is_late:
                self._deliver(late)
            for target in range(NUM_TARGETS):
                self._step(target)
            if self.is_late:
                self._deliver(late)
            self.now += STEP_S
            step += 1

    def _start(self, name: str, target: int, turn: Turn) -> None:
        self._running[name] = (target, turn, [])
        sampling = SamplingParams(temperature=0.0, max_tokens=len(turn.output), ignore_eos=True)
        settings = SpeculationSettings()
        prompt = turn.prompt
        event = target_messages.StartSession(name, list(prompt), len(prompt), sampling, settings, 0)
        self._targets[target].handle(event, self.now)
        if self.arm.has_memory:
            self._tell_memory(draft_messages.AttachSession(name, 1, str(target), list(prompt), sampling, 0))
        if self.arm.has_draft:
            self._on_the_way.append((target, target_messages.SubscribeDraft(DRAFT_STREAM, name, len(prompt))))
            self._draft(name)

    def _tell_memory(self, event: draft_messages.Event) -> None:
        began = time.thread_time()
        actions = self._memory.handle(event)
        self.memory_s += time.thread_time() - began
        for action in actions:
            match action:
                case draft_messages.Subscribe():
                    told: ToTarget = target_messages.SubscribeDraft(
                        MEMORY_STREAM, action.session_id, action.known_len, is_memory=True
                    )
                case draft_messages.SendHints():
                    hints = action.session_id, 1, action.base_len, action.hints, self.now
                    told = target_messages.HintsArrived(*hints, is_memory=True, match_len=action.match_len)
                case _:
                    continue
            self._on_the_way.append((int(action.target_address), told))

    def _draft(self, name: str) -> None:
        """Sends the draft worker's hints below what a session has committed."""
        target, turn, generated = self._running[name]
        hints, is_right = list[Hint](), True
        for node_id, token_id in enumerate(turn.output[len(generated) :][: self.num_speculative_tokens + 1], 1):
            is_right = is_right and self._luck.random() < self.draft_rate
            hints.append(Hint(node_id, node_id - 1, token_id if is_right else WRONG))
        base_len = len(turn.prompt) + len(generated)
        self._on_the_way.append((target, target_messages.HintsArrived(name, 1, base_len, hints, self.now)))

    def _deliver(self, messages: Sequence[tuple[int, ToTarget]]) -> None:
        for target, event in messages:
            if event.session_id in self._running:
                self._publish(self._targets[target].handle(event, self.now))

    def _step(self, target: int) -> None:
        scheduler = self._targets[target]
        decision = scheduler.next_step(self.now)
        if not isinstance(decision, target_messages.Step):
            return
        verdicts = []
        for item in decision.items:
            _, turn, generated = self._running[item.session_id]
            rest = turn.output[len(generated) :]
            verdicts.append(_verified(rest, item) if item.num_decided else None)
        self.num_steps += sum(verdict is not None for verdict in verdicts)
        self._publish(
            scheduler.finish_step(decision, target_messages.StepResult(verdicts, STEP_S * 1e3), self.now + STEP_S)
        )

    def _publish(self, actions: Sequence[target_messages.Action]) -> None:
        for action in actions:
            if isinstance(action, target_messages.TokensCommitted):
                self.num_tokens += len(action.token_ids)
                self._running[action.session_id][2].extend(action.token_ids)
                if self.arm.has_draft:
                    self._draft(action.session_id)
            elif isinstance(action, target_messages.SessionEnded):
                _, turn, generated = self._running.pop(action.session_id)
                assert generated == turn.output, "the output is that of the recording"
            elif isinstance(action, target_messages.CommitPublished) and action.stream_id == MEMORY_STREAM:
                self._tell_memory(
                    draft_messages.CommitReceived(
                        session_id=action.session_id,
                        from_len=action.from_len,
                        token_ids=action.token_ids,
                        accepts_hints=action.accepts_hints,
                        is_finished=action.is_finished,
                        num_verified=action.num_verified,
                        num_matched=action.num_matched,
                    )
                )


def _verified(rest: list[int], item: target_messages.StepItem) -> Verdict:
    """The verdict of a target whose next tokens are `rest`."""
    choices = [*rest, *[0] * item.num_decided][: item.num_decided]
    hints, num_matched = item.hints, 0
    while num_matched < min(len(hints), len(choices)) and hints[num_matched].token_id == choices[num_matched]:
        num_matched += 1
    num_accepted = min(num_matched, len(choices) - 1)
    return Verdict(choices[: num_accepted + 1], num_accepted, num_matched)


def compare(
    clients: Sequence[Client], num_speculative_tokens: int, *, draft_rate: float = 0.7, is_late: bool = False
) -> dict[str, Any]:
    """Tokens per step of each arm, and what the memory costs."""
    found: dict[str, Any] = {}
    for name, arm in ARMS.items():
        replay = Replay(clients, num_speculative_tokens, arm, draft_rate, is_late)
        replay.run()
        found[name] = round(replay.num_tokens / replay.num_steps, 3)
        if name == MEMORY:
            found["memory_us_per_token"] = round(replay.memory_s / replay.num_tokens * 1e6, 1)
    found["memory_over_lookup"] = round(found[MEMORY] / found[LOOKUP], 3)
    found["memory_over_draft"] = round(found[BOTH] / found[DRAFT], 3)
    return found


def generate(model_dir: Path, prompts: Sequence[list[int]], temperature: float, count: int, num_tokens: int) -> Any:
    """For each prompt, `count` outputs of the target."""
    from target_worker.runner import run_step  # imports torch

    engine = load(model_dir, max_num_seqs=count)
    limits = SchedulerLimits(max_num_seqs=count, max_model_len=engine.max_model_len)
    scheduler = Scheduler(limits, engine.allocator, engine.vocab_size)
    outputs: list[list[list[int]]] = []
    for prompt in prompts:
        texts: dict[str, list[int]] = {str(seed): [] for seed in range(count)}
        for name in texts:
            seed = int(name) if temperature else None
            sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True)
            settings = SpeculationSettings(enabled=False)
            event = target_messages.StartSession(name, list(prompt), len(prompt), sampling, settings, int(name))
            scheduler.handle(event, 0.0)
        while (decision := scheduler.next_step(0.0)) is not None:
            assert isinstance(decision, target_messages.Step)
            for action in scheduler.finish_step(decision, run_step(engine, decision), 0.0):
                if isinstance(action, target_messages.TokensCommitted):
                    texts[action.session_id] += action.token_ids
        outputs.append(list(texts.values()))
    return outputs


def edited(text: str, chance: random.Random, share: float) -> str:
    """The text with a word replaced by another of its words in a share of its lines."""
    words = re.findall(r"[A-Za-z_]{3,}", text) or ["nothing"]
    lines = text.split("\n")
    for index in chance.sample(range(len(lines)), max(round(share * len(lines)), 1)):
        lines[index] = re.sub(r"[A-Za-z_]{3,}", chance.choice(words), lines[index], count=1)
    return "\n".join(lines)


def agent_loop(tokenizer: Tokenizer, file: str, num_attempts: int, num_turns: int, stagger: int) -> list[Client]:
    """Attempts at one task. In every turn all of them make the same edits, and each some of its own."""
    clients = []
    for attempt in range(num_attempts):
        version, prompt, turns = file, tokenizer.encode("# Improve this module.\n"), []
        for number in range(num_turns):
            version = edited(version, random.Random(number), EDITED_SHARE)
            version = edited(version, random.Random(1000 * attempt + number), OWN_SHARE)
            output = tokenizer.encode(version)
            turns.append(Turn(prompt, output))
            prompt = [*prompt, *output, *tokenizer.encode(f"\n# Turn {number}: 3 tests failed. Try again.\n")]
        clients.append(Client(turns, attempt * stagger))
    return clients


def table(result: Mapping[str, Any]) -> str:
    """Tokens per step, one line per workload."""
    heads = ("lookup", "recent", "memory", "gain", "draft", "both", "gain", "µs/token")
    columns = (LOOKUP, RECENT, MEMORY, "memory_over_lookup", DRAFT, BOTH, "memory_over_draft", "memory_us_per_token")
    lines = [f"{'workload':28}" + "".join(f"{head:>9}" for head in heads)]
    for name, each in result["workloads"].items():
        lines.append(f"{name:28}" + "".join(f"{each[column]:9.2f}" for column in columns))
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__, has_draft=False, has_table=True)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.3, 1.0], help="of rollouts")
    parser.add_argument("--prompts", type=int, default=4, help="prompts with rollouts (default %(default)s)")
    parser.add_argument("--rollouts", type=int, default=8, help="of a prompt, attempts of agents (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=300, help="of a rollout (default %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="of an agent (default %(default)s)")
    parser.add_argument("--stagger", type=int, default=20, help="steps between two rollouts (default %(default)s)")
    parser.add_argument("--attempt-stagger", type=int, default=400, help="and two attempts (default %(default)s)")
    parser.add_argument("--hints", type=int, default=7, help="most verified per step (default %(default)s)")
    parser.add_argument("--draft-rate", type=float, default=0.7, help="of right hints of a draft (default %(default)s)")
    parser.add_argument("--late", action="store_true", help="hints arrive one step late")
    arguments = parser.parse_args()
    workloads: dict[str, Any] = {}
    with target_model(arguments) as model_dir:
        tokenizer = Tokenizer(model_dir)
        prompts = [tokenizer.encode(text) for text in held_out_prompts(arguments.prompts, seed=1)]
        for temperature in arguments.temperatures:
            say(f"rollouts at temperature {temperature:g}")
            clients: list[Client] = []
            for prompt, outputs in zip(
                prompts,
                generate(model_dir, prompts, temperature, arguments.rollouts, arguments.tokens),
                strict=True,
            ):
                first = clients[-1].starts_at + arguments.tokens if clients else 0
                clients += [
                    Client([Turn(prompt, output)], first + number * arguments.stagger)
                    for number, output in enumerate(outputs)
                ]
            found = compare(clients, arguments.hints, draft_rate=arguments.draft_rate, is_late=arguments.late)
            workloads[f"rollouts, temperature {temperature:g}"] = found
    file = min((each.text for each in held_out_files() if len(each.text) > 2000), key=len)
    loop = agent_loop(tokenizer, file, arguments.rollouts, arguments.turns, arguments.attempt_stagger)
    workloads["agent loop"] = compare(loop, arguments.hints, draft_rate=arguments.draft_rate, is_late=arguments.late)
    report(arguments, {"machine": machine(), "workloads": workloads}, table=table)


if __name__ == "__main__":
    main()
