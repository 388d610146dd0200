"""The one exception that means: the user's input or machine is at fault, and one line says what to do."""


class Refused(ValueError):
    """Bad input, in one line: what was found where, what was wanted, what to do."""

    def _render_traceback_(self) -> list[str]:
        """What Jupyter shows in place of a traceback."""
        return [f"Refused: {self}"]


class VerifierRefused(Refused):
    """The verifier's own files are at fault, not what is compared with it."""
