"""Options of the families of this distribution."""

from __future__ import annotations

from miles_core.tito.options import ThinkingSwitch


class DeepSeekOptions(ThinkingSwitch):
    """Of `deepseek-v31`, which answers at once unless it is told to reason."""

    thinking: bool = False
    """Whether the model reasons before it answers; if not, the opener of its turn holds an empty thought."""
