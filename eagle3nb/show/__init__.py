"""What people look at: tables, tensors, tokens and curves, the same in JupyterLab, under papermill and in HTML.

Everything is a plain HTML table or a PNG, so it survives export. Text from models and data is escaped: tokens are
untrusted. Plots leave the picture and the numbers behind it in the stage's ``plots/``.
"""

from eagle3nb.show.plots import Live, accuracy, bars, curves, layer_norms, loss_by_position, scatter, training
from eagle3nb.show.strip import STRIP_LEGEND, draft_steps, steps
from eagle3nb.show.tables import checks, checks_text, config, number, table, tensors, tokens

__all__ = [
    "STRIP_LEGEND", "Live", "accuracy", "bars", "checks", "checks_text", "config", "curves", "draft_steps",
    "layer_norms", "loss_by_position", "number", "scatter", "steps", "table", "tensors", "tokens", "training",
]  # fmt: skip
