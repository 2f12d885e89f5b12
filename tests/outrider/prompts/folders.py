"""Tokenizer folders that differ in where templates, special tokens and added tokens stand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_ALL = (
    "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}{{ image_token }}"
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|><|extra|>{% endfor %}"
)
_USES_TOOLS = "T{{ tools | tojson if tools else 'none' }}{{ messages[0].content }}"

_ADDED = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}


def _described(content: str, **flags: Any) -> dict[str, Any]:
    return {"content": content, **_ADDED, **flags}


Folder = Mapping[str, Any]
"""Files by name: JSON, or text. `tokenizer.json` names tokens to add to it."""

FOLDERS: Final[dict[str, Folder]] = {
    "special tokens as text": {
        "tokenizer_config.json": {"bos_token": "<|im_start|>", "eos_token": "<|end|>", "chat_template": _ALL},
        "tokenizer.json": ["<|im_start|>"],
    },
    "special tokens as descriptions": {
        "tokenizer_config.json": {
            "bos_token": {"__type": "AddedToken", **_described("<|im_start|>")},
            "eos_token": {"__type": "AddedToken", **_described("<|end|>")},
            "chat_template": _ALL,
        },
        "tokenizer.json": ["<|im_start|>", "<|im_end|>"],
    },
    "special tokens that are null": {
        "tokenizer_config.json": {"bos_token": None, "eos_token": "<|end|>", "pad_token": None, "chat_template": _ALL}
    },
    "special tokens in a map": {
        "tokenizer_config.json": {"chat_template": _ALL},
        "special_tokens_map.json": {"bos_token": "<|im_start|>", "eos_token": _described("<|end|>")},
        "tokenizer.json": ["<|im_start|>"],
    },
    "a map beside another configuration": {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": _ALL},
        "special_tokens_map.json": {"eos_token": "<|end|>", "pad_token": "<|end|>"},
        "tokenizer.json": ["<|im_end|>"],
    },
    "a map beside described tokens": {  # which make the map obsolete
        "tokenizer_config.json": {
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": {"300": _described("<|im_end|>")},
            "chat_template": _ALL,
        },
        "special_tokens_map.json": {"eos_token": "<|end|>", "pad_token": "<|end|>"},
        "tokenizer.json": ["<|im_end|>"],
    },
    "tokens added by the configuration alone": {
        "tokenizer_config.json": {
            "eos_token": "<|end|>",
            "added_tokens_decoder": {
                "0": _described("<|end|>"), "300": _described("<|im_start|>"),
                "301": _described("<|im_end|>"), "302": _described("<|extra|>", special=False),
            },
            "chat_template": _ALL,
        }
    },
    "tokens added by a file": {
        "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": _ALL},
        "added_tokens.json": {"<|im_start|>": 300, "<|im_end|>": 301},
    },
    "tokens added by tokenizer.json alone": {
        "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": _ALL},
        "tokenizer.json": ["<|im_start|>", "<|im_end|>", "<|extra|>"],
    },
    "additional special tokens": {
        "tokenizer_config.json": {
            "eos_token": "<|end|>", "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": _ALL,
        }
    },
    "extra special tokens by name": {
        "tokenizer_config.json": {
            "eos_token": "<|end|>", "extra_special_tokens": {"image_token": "<|extra|>"}, "chat_template": _ALL,
        }
    },
    "extra special tokens in a list": {
        "tokenizer_config.json": {
            "eos_token": "<|end|>", "extra_special_tokens": ["<|extra|>", "<|im_end|>"], "chat_template": _ALL,
        }
    },
    "a token of the model's own": {
        "tokenizer_config.json": {"eos_token": "<|end|>", "image_token": "<|extra|>", "chat_template": _ALL}
    },
    "an end token that is in no vocabulary": {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": _ALL}
    },
    "tokens that swallow blanks": {
        "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": "a <|x|> b <|y|> {{ messages[0].content }}"},
        "tokenizer.json": [_described("<|x|>", lstrip=True), _described("<|y|>", rstrip=True)],
    },
    "special tokens are split": {
        "tokenizer_config.json": {"eos_token": "<|end|>", "split_special_tokens": True, "chat_template": _ALL}
    },
    "options that do not matter": {
        "tokenizer_config.json": {
            "add_bos_token": True, "add_eos_token": True, "add_prefix_space": False, "legacy": True,
            "eos_token": "<|end|>", "bos_token": "<|end|>", "clean_up_tokenization_spaces": True,
            "model_max_length": 10**30, "sp_model_kwargs": {}, "padding_side": "right", "errors": "replace",
            "use_default_system_prompt": False, "chat_template": _ALL,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
    },
    "no configuration": {"tokenizer_config.json": None, "chat_template.jinja": _ALL},
    "an empty configuration": {"tokenizer_config.json": {}, "chat_template.jinja": _ALL},
    "named templates in a list": {
        "tokenizer_config.json": {
            "eos_token": "<|end|>",
            "chat_template": [{"name": "default", "template": "D{{ messages[0].content }}"},
                              {"name": "tool_use", "template": _USES_TOOLS}],
        }
    },
    "a named template alone": {
        "tokenizer_config.json": {
            "eos_token": "<|end|>", "chat_template": [{"name": "default", "template": _USES_TOOLS}],
        }
    },
    "named templates without default": {
        "tokenizer_config.json": {
            "eos_token": "<|end|>",
            "chat_template": [{"name": "tool_use", "template": _USES_TOOLS}, {"name": "rag", "template": _ALL}],
        }
    },
    "a template for documents": {
        "tokenizer_config.json": {
            "eos_token": "<|end|>",
            "chat_template": [{"name": "default", "template": _ALL}, {"name": "rag", "template": "R{{ documents }}"}],
        }
    },
    "a file of a template": {"tokenizer_config.json": {"eos_token": "<|end|>"}, "chat_template.jinja": _ALL},
    "a file before the configuration": {
        "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": "C"}, "chat_template.jinja": _ALL,
    },
    "files of named templates": {
        "tokenizer_config.json": {"eos_token": "<|end|>"},
        "chat_template.jinja": "D{{ messages[0].content }}",
        "additional_chat_templates/tool_use.jinja": _USES_TOOLS,
    },
    "a file of a named template beside the configuration": {
        "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": _ALL},
        "additional_chat_templates/tool_use.jinja": _USES_TOOLS,
    },
    "a processor's template": {  # which tokenizers do not read
        "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": _ALL},
        "chat_template.json": {"chat_template": "P"},
    },
    "end tokens of the generation": {
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "chat_template": _ALL},
        "tokenizer.json": ["<|im_end|>"],
        "generation_config.json": {"eos_token_id": [0]},
    },
    "a template with carriage returns": {
        "tokenizer_config.json": {"eos_token": "<|end|>"},
        "chat_template.jinja": "{% for m in messages %}\r\n{{ m.content }}\r\n{% endfor %}\r\n",
    },
}  # fmt: skip


def write_folder(model: Path, folder: Path, files: Folder) -> Path:
    """Copies a model folder, with other files."""
    shutil.copytree(model, folder)
    for name, content in files.items():
        path = folder / name
        if name == "tokenizer.json":
            description = json.loads(path.read_text())
            for token_id, token in enumerate(content, 1 + max(description["model"]["vocab"].values())):
                described = token if isinstance(token, dict) else _described(token)
                description["added_tokens"].append({"id": token_id, **described})
            path.write_text(json.dumps(description))
        elif content is None:
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content), newline="")
    return folder
