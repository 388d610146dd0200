"""eagle3nb: train EAGLE-3 draft models in measured steps, one notebook per stage."""

__version__ = "0.1.0"
