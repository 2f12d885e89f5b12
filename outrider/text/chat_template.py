"""Prompts of conversations: a model folder's chat templates, rendered by transformers' own code. Never imports torch.

Everything that decides about a prompt's text is transformers': which files hold templates and special tokens, which of
several templates is used, what a template may call, and its sandbox, to which `outrider.text.template_limits` adds
bounds. transformers is imported when a folder is loaded and not before: that takes 0.6 s of processor time and 27 MiB
in a coordinator.

Clients send conversations as OpenAI defines them, which leaves open what `outrider.text.message_forms` decides.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jinja2

from outrider.errors import ConfigurationError, InvalidRequest
from outrider.text.message_forms import TemplateTraits, find_traits, forms_of
from outrider.text.template_limits import STEPS_MAX, BoundedEnvironment, TemplateLimit, at_most

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# For a model without a chat format: the contents of the messages, one after another.
PLAIN_CHAT_TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"

# Errors of a template with variables chosen by the client: `range(x)` too long, text times a large number, a
# conversation nested too deeply for JSON.
_TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip
_WRONG_FORM_ERRORS: Final = (TypeError, jinja2.UndefinedError)
"""Templates raise these for a value of another type than they expect, and a `jinja2.TemplateError` for what they refuse
deliberately."""

_REFUSAL_CHARS_MAX: Final = 1000
"""A template's message may hold the whole conversation."""
_VARIABLES: Final = frozenset({"tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Arguments of transformers that are variables of every template, or decide about the prompt's end."""


def read_folder(model_dir: Path) -> PreTrainedTokenizerFast:
    """Reads a folder's tokenizer, special tokens and chat templates. Raises ConfigurationError.

    The class is always the one for any `tokenizer.json`, whatever class the folder names. No code of the folder runs.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(str(model_dir), local_files_only=True)
    except Exception as error:  # the Rust side raises bare Exception for a bad file, transformers whatever it meets
        raise ConfigurationError(f"cannot load the tokenizer in {model_dir}: {error}") from error


def check_chat_template(template: str, what: str) -> None:
    """Raises ConfigurationError if a template is not valid Jinja, as chat templates may use it."""
    try:
        _render([], template, {}, STEPS_MAX)  # of no conversation: only compiles it
    except _TEMPLATE_ERRORS as error:
        raise ConfigurationError(f"{what} is not valid: {error}") from error


def _render(conversations: list[Any], template: str, values: Mapping[str, Any], num_steps: int) -> list[str]:
    """Renders conversations by transformers' code in our environment, in so many steps."""
    with at_most(num_steps):
        rendered, _ = _transformers().render_jinja_template(conversations, chat_template=template, **values)
    return [str(each) for each in rendered]


@cache
def _transformers() -> Any:
    """The module of transformers that compiles and renders templates: a copy of our own, with our environment for them.

    It makes the environment of each template from a name of the module, and offers no other way in.
    """
    spec = importlib.util.find_spec("transformers.utils.chat_template_utils")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ImmutableSandboxedEnvironment = BoundedEnvironment
    with at_most(STEPS_MAX):
        environment = module._compile_jinja_template("").environment
    if not isinstance(environment, BoundedEnvironment):
        raise ConfigurationError(
            "this version of transformers makes the environment of chat templates in another way, so that a template "
            "would have no bounds; install the version that pyproject.toml names"
        )
    return module


class ChatTemplates:
    """The chat templates of a model folder. Thread-safe."""

    def __init__(self, folder: PreTrainedTokenizerFast, given: str | None = None) -> None:
        """`given` takes the place of the folder's own templates. Raises ConfigurationError if it is not Jinja."""
        self._folder = folder
        if given:
            check_chat_template(given, "the given chat template")
        own = given or folder.chat_template
        self.is_own = bool(own)
        """False: the model has no template, and messages are joined by newlines."""
        self._templates: Any = own or PLAIN_CHAT_TEMPLATE  # a text, or texts by name; from a file that may be wrong
        self._given = None if isinstance(self._templates, dict) else self._templates

    @cached_property
    def text(self) -> str:
        """The text of all templates."""
        named = self._templates
        return "\n".join(map(str, named.values())) if isinstance(named, dict) else str(named)

    def study(self) -> None:
        """Finds what the templates expect, which the first `render` does otherwise. Raises ConfigurationError for a
        template that does not end."""
        _ = self._traits

    @cached_property
    def takes_only_short_call_ids(self) -> bool:
        """Whether a template refuses ids of tool calls that are not nine letters and digits, as Mistral's do."""
        return any(traits.takes_only_short_call_ids for traits in self._traits.values())

    def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], num_steps: int = STEPS_MAX
    ) -> str:
        """Renders a conversation of messages as OpenAI defines them. `variables` are passed to the template; `tools`
        also chooses it.

        Raises TemplateLimit if it takes more than `num_steps`, which are fewer than STEPS_MAX, and InvalidRequest:
        "messages" with the template's message if it refuses them, "continue_final_message" if the last message cannot
        be continued, "chat_template_kwargs" for names that templates cannot use.
        """
        if taken := sorted(self._taken_names & variables.keys()):
            raise InvalidRequest(
                "chat_template_kwargs", f"chat_template_kwargs: {', '.join(taken)} cannot be set for a template"
            )
        if not messages:
            raise InvalidRequest("messages", "messages: at least one message is needed")
        variables = {"add_generation_prompt": True, **variables}
        if variables.get("continue_final_message") and variables["add_generation_prompt"]:
            raise InvalidRequest("continue_final_message", "continue_final_message needs add_generation_prompt: false")
        refusal = ""
        try:
            template = self._folder.get_chat_template(self._given, variables.get("tools"))
            for form in forms_of(messages, self._traits_of(template)):
                try:
                    return self._rendered(template, form, variables, num_steps)
                except _WRONG_FORM_ERRORS as error:
                    refusal = refusal or str(error)
        except TemplateLimit as error:
            if num_steps < STEPS_MAX:
                raise
            refusal = str(error)
        except _TEMPLATE_ERRORS as error:
            refusal = str(error)
        message = refusal[:_REFUSAL_CHARS_MAX]
        if message.startswith("continue_final_message"):  # transformers' own
            raise InvalidRequest("continue_final_message", message)
        raise InvalidRequest("messages", f"the model's chat template refused the messages: {message}")

    def _rendered(
        self, template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], num_steps: int
    ) -> str:
        # Variables come before special tokens of the same names, as in `apply_chat_template`.
        return _render([messages], template, {**self._folder.special_tokens_map, **variables}, num_steps)[0]

    @cached_property
    def _traits(self) -> dict[str, TemplateTraits]:
        """Finds what each template expects, by rendering small conversations."""
        named = self._templates
        found = {}
        for template in named.values() if isinstance(named, dict) else [named]:
            if not isinstance(template, str):
                continue

            def render(messages: Sequence[Mapping[str, Any]], template: str = template, **variables: Any) -> str | None:
                given = {"add_generation_prompt": True, **variables}
                try:
                    return self._rendered(template, messages, given, STEPS_MAX)
                except TemplateLimit as error:
                    raise ConfigurationError(
                        f"the chat template cannot be used: for a conversation of a few words {error}; look at it, or "
                        "give another one with --chat-template"
                    ) from error
                except _TEMPLATE_ERRORS:
                    return None

            found[template] = find_traits(render)
        return found

    def _traits_of(self, template: str) -> TemplateTraits:
        return self._traits.get(template) or TemplateTraits()

    @cached_property
    def _taken_names(self) -> frozenset[str]:
        """Names of arguments by which clients would change how the template is rendered instead of what it sees."""
        from transformers.utils.chat_template_utils import render_jinja_template

        names = {"messages"}
        for function in (type(self._folder).apply_chat_template, render_jinja_template):
            names |= inspect.signature(function).parameters.keys()
        return frozenset(names - {"kwargs"} - _VARIABLES)
