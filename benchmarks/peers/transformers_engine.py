"""transformers' generate(), plain or assisted, as a peer process: `python -m benchmarks.peers.transformers_engine`."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.answering import Batch, Generate, Replies, bind_to_cores, run


class Arrivals:
    """A streamer that notes only when tokens came, and how many came first."""

    def __init__(self) -> None:
        self.num_first = 0
        self.first_at = self.last_at = 0.0
        self._has_prompt = False

    def put(self, token_ids: Any) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.last_at = time.perf_counter()
        if not self.num_first:
            self.num_first, self.first_at = token_ids.numel(), self.last_at

    def end(self) -> None:
        pass


def load(settings: dict[str, Any]) -> tuple[dict[str, Any], Generate]:
    """Loads the models; `num_speculative_tokens` is the assistant's maximum per round."""
    # Before the imports, which start threads.
    bind_to_cores(settings["cores"])
    import torch
    import transformers

    torch.set_num_threads(len(settings["cores"]))

    def model(folder: str) -> Any:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        # Nothing ends a sequence early, so that all systems generate equally much.
        loaded.generation_config.eos_token_id = None
        return loaded

    target = model(settings["target"])
    draft = model(settings["draft"]) if settings["draft"] else None
    if draft is not None:
        draft.generation_config.num_assistant_tokens = settings["num_speculative_tokens"]
        draft.generation_config.num_assistant_tokens_schedule = "constant"

    def generate(batch: Batch, num_tokens: int) -> Replies:
        (prompt,) = batch  # assisted generation takes one at a time
        arrivals = Arrivals()
        with torch.inference_mode():
            output = target.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                assistant_model=draft,
                streamer=arrivals,
            )
        token_ids = output[0, len(prompt) :].tolist()
        return [(token_ids, len(token_ids) - arrivals.num_first, arrivals.last_at - arrivals.first_at)]

    return {"transformers": transformers.__version__}, generate


if __name__ == "__main__":
    run(load)
