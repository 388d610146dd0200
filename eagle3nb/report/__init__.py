"""HTML for people: a page per executed notebook, a report per run, a comparison of runs, a list of runs.

Made only from the JSON, metrics and plots that the stages left; nothing is measured anew and no request leaves a page.
"""

from eagle3nb.report.compare import compare
from eagle3nb.report.index import refresh
from eagle3nb.report.page import export_notebook
from eagle3nb.report.run import start_notes, write
from eagle3nb.report.verdict import headline_lines, summary

__all__ = ["compare", "export_notebook", "headline_lines", "refresh", "start_notes", "summary", "write"]
