"""The real package, but for what `python -m draft_worker` runs."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
