"""Has Griffe read "Example:" as the section that its parser of Google's style calls "Examples:"."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Without it, the prompts of an example are taken for quotations."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the heading; called for each object that has been read."""
        if obj.docstring:
            found = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", found, flags=re.MULTILINE)
