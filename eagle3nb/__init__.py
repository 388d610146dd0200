"""eagle3nb: train EAGLE-3 draft models in measured steps, one notebook per stage."""

import warnings

__version__ = "0.1.0"

# tqdm asks for widgets that nothing here uses; without this the line stands in every notebook.
warnings.filterwarnings("ignore", message="IProgress not found")
