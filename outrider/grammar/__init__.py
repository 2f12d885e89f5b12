"""Grammars for the output, on llguidance: a compiler for one tokenizer, and the state of a sequence in its grammar."""

from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.effort import GrammarViolation
from outrider.grammar.state import GrammarState

__all__ = ["GrammarCompiler", "GrammarState", "GrammarViolation"]
