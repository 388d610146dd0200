"""The verifier's chat template: from turns to token ids, and the marks it leaves that a loss mask can be checked by."""

from pathlib import Path
from typing import Any

from eagle3nb.errors import Refused
from eagle3nb.verifier import Verifier


class ChatTemplate:
    """A chat template with the arguments it is always called with.

    ``file`` replaces the verifier's own template; ``system_prompt`` goes before conversations without a system turn.
    """

    def __init__(
        self,
        verifier: Verifier,
        file: str | None = None,
        arguments: dict[str, Any] | None = None,
        system_prompt: str | None = None,
    ):
        self.verifier, self.arguments, self.system_prompt = verifier, arguments or {}, system_prompt
        self.template = None
        if file:
            if not Path(file).is_file():
                raise Refused(f"prepare_data.chat_template: no such file {file}")
            self.template = Path(file).read_text()
        if not (self.template or verifier.tokenizer.chat_template):
            raise Refused(f"verifier {verifier.name} has no chat template; give one as prepare_data.chat_template")
        if not self.generation_prompt():
            raise Refused(
                "the chat template has no boundary: its prompt with and without add_generation_prompt are the same, "
                "so the loss mask cannot be found; give a template with one as prepare_data.chat_template"
            )

    def with_system_prompt(self, turns: list[dict[str, str]]) -> list[dict[str, str]]:
        """The turns, after the system prompt where they have none of their own."""
        if self.system_prompt and turns[0]["role"] != "system":
            return [{"role": "system", "content": self.system_prompt}, *turns]
        return turns

    def ids(self, turns: list[dict[str, str]], prompt: bool) -> list[int]:
        """Token ids of the turns; with ``prompt`` also what opens the assistant's next turn."""
        return self.verifier.tokenizer.apply_chat_template(
            turns,
            chat_template=self.template,
            add_generation_prompt=prompt,
            tokenize=True,
            return_dict=False,
            **self.arguments,
        )

    def generation_prompt(self) -> list[int]:
        """The tokens that open the assistant's turn: every response begins right after them."""
        turns = [{"role": "user", "content": "Hello"}]
        without = self.ids(turns, prompt=False)
        return self.ids(turns, prompt=True)[len(without) :]

    def opening(self) -> list[int]:
        """The tokens before the first user's words: the system prompt, where the template has or is given one."""
        one, other = (self.with_system_prompt([{"role": "user", "content": text}]) for text in ("A", "7"))
        one, other = self.ids(one, prompt=False), self.ids(other, prompt=False)
        same = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
        return one[:same]
