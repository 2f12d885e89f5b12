"""Grammars that the output must follow, over llguidance: a compiler for one tokenizer, and where a text stands."""

from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.position import GrammarViolation
from outrider.grammar.state import GrammarState

__all__ = ["GrammarCompiler", "GrammarState", "GrammarViolation"]
