"""Equal lines for equal engines on equal machines, and another line wherever a bit of the logits may differ."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.engine.compiled.numerics import Arithmetic, cpu_class, cpu_model, describe
from outrider.engine.loading.checkpoint_fingerprint import checkpoint_fingerprint
from outrider.engine.loading.loading import load_model
from outrider.registry.worker_record import WorkerRecord
from outrider.worker.worker_facts import identity, record_from_info, worker_info
from outrider.worker.worker_options import WorkerOptions
from tests import models
from tests.engine.quantized_checkpoints import ENCODERS, write_pair

OURS = Arithmetic("bfloat16", "none", 1, "cpu/avx512-bf16", "compiled-4", {"64x64": "compiled", "8x64": "compiled"}, 1)
LIBRARY = replace(OURS, linear_forms={"64x64": "packed", "8x64": "plain"})
PROBE = torch.arange(12.0).view(3, 4)


def line(arithmetic: Arithmetic, probe: torch.Tensor = PROBE, processor: str = "GenuineIntel-6-207") -> str:
    return describe(arithmetic, probe, processor)


def loaded(directory: Path, dtype: str = "bfloat16", **options: Any) -> str:
    return load_model(models.engine_config(directory, dtype, **options)).numerics


class TestTheLine:
    @pytest.mark.parametrize("base", [OURS, LIBRARY], ids=["compiled", "library"])
    @pytest.mark.parametrize(
        "change",
        [
            {"dtype": "float32"},
            {"quantization": "int8"},
            {"num_ranks": 2},
            {"device": "cpu/amx"},
            {"device": "cuda/sm90/NVIDIA H100 80GB HBM3/132"},
            {"layers": "modules"},
            {"linear_forms": {"64x64": "packed", "8x64": "packed"}},
            {"linear_forms": {"64x64": "plain", "8x64": "packed"}},
        ],
        ids=str,
    )
    def test_whatever_may_change_a_bit_makes_another_line(self, base: Arithmetic, change: dict[str, Any]) -> None:
        assert line(base) == line(replace(base))
        assert line(replace(base, **change)) != line(base)

    def test_threads_and_the_very_processor_count_where_a_library_multiplies(self) -> None:
        other = "GenuineIntel-6-143"
        assert line(replace(OURS, num_threads=4), processor=other) == line(OURS)
        assert line(replace(LIBRARY, num_threads=4)) != line(LIBRARY)
        assert line(LIBRARY, processor=other) != line(LIBRARY)

    def test_who_made_the_processor_always_counts(self) -> None:
        assert line(OURS, processor="AuthenticAMD-26-2") != line(OURS)

    def test_a_difference_of_one_bit_in_the_probe_counts(self) -> None:
        probe = PROBE.clone()
        probe[1, 2] = torch.nextafter(probe[1, 2], torch.tensor(100.0))
        assert line(OURS, probe) != line(OURS)

    def test_it_is_one_line_of_words_without_blanks(self) -> None:
        found = line(replace(LIBRARY, device="cuda/sm90/NVIDIA H100 80GB HBM3/132"))
        assert "cuda/sm90/NVIDIA-H100-80GB-HBM3/132" in found.split(" ")
        assert found.isprintable()
        assert len(found) < 400


class TestProcessors:
    @pytest.mark.parametrize(
        ("machine", "capability", "has_amx", "has_bfloat16", "expected"),
        [
            ("x86_64", "AVX512", True, True, "cpu/amx"),
            ("x86_64", "AVX512", False, True, "cpu/avx512-bf16"),
            ("x86_64", "AVX2", True, True, "cpu/amx-as-avx2"),
            ("x86_64", "AVX512", False, False, "cpu/avx512"),
            ("x86_64", "AVX2", False, False, "cpu/avx2"),
            ("x86_64", "DEFAULT", False, False, "cpu/generic"),
            ("aarch64", "SVE256", False, False, "cpu/aarch64-sve256"),
            ("arm64", "DEFAULT", False, False, "cpu/arm64-generic"),
        ],
    )
    def test_classes(self, machine: str, capability: str, has_amx: bool, has_bfloat16: bool, expected: str) -> None:
        assert cpu_class(machine, capability, has_amx=has_amx, has_bfloat16=has_bfloat16) == expected

    def test_the_processor_is_read_from_its_description(self, tmp_path: Path) -> None:
        described = tmp_path / "cpuinfo"
        described.write_text(
            "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: X\n\n"
            "processor\t: 1\nvendor_id\t: Other\n"
        )
        assert cpu_model(described) == "AuthenticAMD-26-2"
        assert cpu_model(tmp_path / "nothing")


class TestEngines:
    def test_equal_engines_have_equal_lines_wherever_their_folder_lies(self, tmp_path: Path) -> None:
        copy = models.copy_of("llama", tmp_path / "copy")
        for dtype in ("float32", "bfloat16"):
            assert loaded(copy, dtype) == loaded(models.model_dir("llama"), dtype)

    def test_room_for_sequences_changes_nothing(self) -> None:
        directory = models.model_dir("llama")
        assert loaded(directory, max_num_seqs=3, max_model_len=64, block_size=16) == loaded(directory)

    @pytest.mark.thorough
    def test_types_quantization_and_kernels_make_another_line(self) -> None:
        directory = models.model_dir("llama")
        lines = [
            loaded(directory),
            loaded(directory, "float32"),
            loaded(directory, quantization="int8"),
            loaded(directory, quantization="fp8"),
        ]
        assert len(set(lines)) == 4, lines
        if "layers=compiled" in lines[0]:
            assert loaded(directory, enforce_eager=True) not in lines

    def test_a_tensor_that_was_trained_further_changes_the_probe_too(self, tmp_path: Path) -> None:
        """Also where the fingerprint only samples."""
        tuned = models.copy_of("llama", tmp_path / "tuned")
        tensors = load_file(tuned / "model.safetensors")
        tensors["model.layers.1.mlp.down_proj.weight"] *= 1.05
        save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
        assert loaded(tuned) != loaded(models.model_dir("llama"))

    @pytest.mark.parametrize("method", ENCODERS)
    def test_published_quantized_weights_are_told_from_the_plain_ones(self, tmp_path: Path, method: str) -> None:
        quantized, plain = write_pair(method, tmp_path)
        copy = shutil.copytree(quantized, tmp_path / "copy")
        assert checkpoint_fingerprint(quantized) == checkpoint_fingerprint(copy)
        assert checkpoint_fingerprint(quantized) != checkpoint_fingerprint(plain)
        assert loaded(quantized) == loaded(copy)


class TestWorkers:
    OPTIONS = WorkerOptions("127.0.0.1", 0, None, 0, "w", 1.0)

    def record(self, directory: Path, **options: Any) -> WorkerRecord:
        engine = load_model(models.engine_config(directory, "bfloat16", **options))
        info = worker_info(engine, self.OPTIONS, "mine", "run-1", max_num_seqs=4)
        assert identity(info).items() >= {"numerics": info.numerics, "model": "mine"}.items()
        assert identity(info)["weights_fingerprint"] == info.weights_fingerprint
        return record_from_info("target", info, "h:1")

    def test_record_says_whose_weights_and_by_which_arithmetic(self) -> None:
        directory = models.model_dir("llama")
        record = self.record(directory)
        assert record.weights_fingerprint == checkpoint_fingerprint(directory)
        assert record.numerics == loaded(directory)
        assert WorkerRecord.from_fields(record.to_fields()) == record

    def test_a_model_that_drafts_for_itself_has_equal_weights_and_other_numerics(self) -> None:
        directory = models.model_dir("llama")
        target, draft = self.record(directory), self.record(directory, quantization="int8", has_trees=True)
        assert draft.weights_fingerprint == target.weights_fingerprint
        assert draft.numerics != target.numerics
