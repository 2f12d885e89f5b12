"""The prompts of the demo. Pure.

Passages of Python's standard library (3.11, PSF licence) from files that `demo/corpus.py` holds out: no stage of the
demo pair's training has seen them. Picked among seventy for an answer that does not go round in circles, as a small
model's greedy text likes to: circles are easy to guess and would flatter speculation.
"""

from __future__ import annotations

from typing import Final

# From venv/__init__.py, importlib/__init__.py, asyncio/taskgroups.py and ast.py.
DEMO_PROMPTS: Final[tuple[str, ...]] = (
    """        # Assign and update the command to use when launching the newly created
        # environment, in case it isn't simply the executable script (e.g. bpo-45337)
        context.env_exec_cmd = context.env_exe
        if sys.platform == 'win32':
            # bpo-45337: Fix up env_exec_cmd to account for file system redirections.""",
    """        if loader is None:
            raise ValueError('{}.__loader__ is None'.format(name))
        else:
            return loader
    except KeyError:
        pass
    except AttributeError:
        raise ValueError('{}.__loader__ is not set'.format(name)) from None

    spec = _bootstrap._find_spec(name, path)
    # We won't worry about malformed specs (missing attributes).
    if spec is None:
        return None
    if spec.loader is None:
        if spec.submodule_search_locations is None:""",
    '''                me = BaseExceptionGroup('unhandled errors in a TaskGroup', self._errors)
                raise me from None
            finally:
                self._errors = None

    def create_task(self, coro, *, name=None, context=None):
        """Create a new task in this group and return it.

        Similar to `asyncio.create_task`.
        """
        if not self._entered:
            raise RuntimeError(f"TaskGroup {self!r} has not been entered")''',
    '''            return nullcontext()

    def require_parens(self, precedence, node):
        """Shortcut to adding precedence related parens"""
        return self.delimit_if("(", ")", self.get_precedence(node) > precedence)

    def get_precedence(self, node):
        return self._precedences.get(node, _Precedence.TEST)''',
)
