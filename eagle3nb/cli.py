"""The command ``eagle3nb``: run stages, check and import artefacts, write reports, plan, export drafts.

Exit codes: 0 done, 1 a stage or a check failed, 2 refused, 130 stopped.
"""

import argparse
import sys
from pathlib import Path

from eagle3nb import __version__
from eagle3nb.errors import Refused


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="eagle3nb", description="Train EAGLE-3 draft models in measured steps.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run the stages of a params file, or go on with a run")
    run.add_argument("params", nargs="?", help="params file, e.g. params/smollm2.yaml")
    run.add_argument(
        "-p", dest="overrides", action="append", default=[], metavar="SECTION.FIELD=VALUE",
        help="set one parameter, e.g. -p train.epochs=5 (again for more)",
    )  # fmt: skip
    run.add_argument("--run-dir", help="work in this run directory; finished stages are not run again")
    run.add_argument("--runs-dir", default="runs", help="where new run directories are made (default: runs)")
    run.add_argument("--from", dest="first", metavar="STAGE", help="first stage to run")
    run.add_argument("--until", dest="last", metavar="STAGE", help="last stage to run")

    check = commands.add_parser(
        "check", help="check a run, store, sample, vocabulary mapping or draft, whoever made it"
    )
    check.add_argument("path", help="what to check; it is worked out what it is")
    check.add_argument("--verifier", metavar="V", help="hub id, directory or package:NAME (a run knows its own)")
    check.add_argument("--against", metavar="PATH", help="checkpoint, store, config or run to compare with")
    check.add_argument("--deep", action="store_true", help="read every byte: checksums, NaN and Inf")
    check.add_argument("--json", action="store_true", help="print the entries of checks.json instead of a table")
    check.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the verifier")

    take = commands.add_parser(
        "import", help="turn samples, a vocabulary mapping or a draft of other tools into this one's form"
    )
    take.add_argument(
        "source", help="directory of samples, mapping (t2d/d2t), list of ids, token counts, draft config or checkpoint"
    )
    take.add_argument("dest", help="where the store or the mapping is written")
    take.add_argument("--verifier", metavar="V", required=True, help="hub id, directory or package:NAME")
    take.add_argument("--from", dest="form", metavar="FORMAT", help="format of the samples (found out where left out)")
    take.add_argument("--layer-ids", help="inputs of layers, e.g. 2,30,58 (measured where the verifier fits in memory)")
    take.add_argument(
        "--conversations", metavar="FILE", help="what the samples were made from, for a missing loss mask"
    )
    take.add_argument("--draft-vocab-size", type=int, metavar="N", help="tokens to choose from token counts")
    take.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the verifier")

    report = commands.add_parser("report", help="write report.html of a run anew, or compare several runs in one page")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run directory; with more than one they are compared")
    report.add_argument(
        "--out", metavar="FILE", help="where the comparison goes (default: compare.html beside the first)"
    )

    plan = commands.add_parser("plan", help="tokens, disk, memory and time of a run, before anything starts")
    plan.add_argument("params", help="params file")
    plan.add_argument("-p", dest="overrides", action="append", default=[], metavar="SECTION.FIELD=VALUE")

    export = commands.add_parser("export", help="write a draft checkpoint in the naming of vLLM or SGLang")
    export.add_argument("source", help="run directory, or a draft checkpoint of either naming")
    export.add_argument("destination", help="new directory")
    export.add_argument("--to", required=True, metavar="vllm|sglang", help="who will serve it")
    export.add_argument("--verifier", metavar="NAME", help="the verifier's name in the exported config")
    export.add_argument("--anyway", action="store_true", help="also where the target ignores some of the config")

    shard = commands.add_parser("shard", help="extract one part of a run's hidden states, beside others at work")
    shard.add_argument("run", help="run directory; its data are prepared")
    shard.add_argument("part", metavar="K/N", help="which part, from 0, of how many")

    made = commands.add_parser("tiny", help="make a tiny checkpoint: llama or kimi-k2.5")
    made.add_argument("name", metavar="llama|kimi-k2.5")
    made.add_argument("folder", help="new directory")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the command; every error is one line."""
    args = parser().parse_args(arguments)
    try:
        if args.command == "run":
            return _run(args)
        commands = {
            "check": _check, "import": _import, "report": _report, "plan": _plan, "export": _export, "shard": _shard,
            "tiny": _tiny,
        }  # fmt: skip
        return commands[args.command](args)
    except Refused as error:
        print(f"eagle3nb: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"eagle3nb: {error.filename or args.command}: {error.strerror or error}", file=sys.stderr)
        return 2
    except Exception as error:
        # These read what others wrote, of any form.
        if args.command not in ("check", "import", "export", "plan", "report"):
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        print(f"eagle3nb: {args.command}: a file there has a form that cannot be used ({why})", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        how = f": {stopped}" if str(stopped) else ""
        line = f"eagle3nb: stopped; what is complete is kept, run the same directory again to go on{how}"
        print(line, file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    from eagle3nb import files, report
    from eagle3nb import run as runner

    try:
        folder = runner.run(
            args.params, overrides=args.overrides, run_dir=args.run_dir, runs_dir=args.runs_dir,
            first=args.first, last=args.last,
        )  # fmt: skip
    except runner.StageFailed as error:
        print(f"eagle3nb: {error}", file=sys.stderr)
        return 1
    record, verdict, sentence = report.summary(folder)
    print(f"\n{verdict}: {sentence}")
    print("\n".join(report.headline_lines(record)))
    print(f"report: {files.shown(folder / 'report.html')}")
    return 0


def _check(args: argparse.Namespace) -> int:
    import json

    from eagle3nb import bridges, show, verifier

    if not args.path.strip():
        raise Refused("check: an empty path; name what to check")
    if args.verifier is not None and not args.verifier.strip():
        raise Refused("--verifier: an empty name; give a directory, a hub id, package:NAME or tiny:NAME")
    trust = args.trust_remote_code
    given = verifier.resolve(args.verifier, trust_remote_code=trust) if args.verifier else None
    artefacts, entries = bridges.check_path(args.path, given, args.against, args.deep, trust)
    if args.json:
        print(json.dumps(entries, indent=2, ensure_ascii=False))
    else:
        print(f"{args.path}: {artefacts.kind}\n{show.checks_text(entries)}")
    return 1 if bridges.failures(entries) else 0


def _import(args: argparse.Namespace) -> int:
    from eagle3nb import foreign, verifier

    found = verifier.resolve(args.verifier, trust_remote_code=args.trust_remote_code)
    source, dest = Path(args.source), Path(args.dest)
    if not source.exists():
        raise Refused(f"{source}: no such file or directory")
    try:
        layers = [int(k) for k in args.layer_ids.split(",")] if args.layer_ids else None
    except ValueError:
        raise Refused(f"--layer-ids {args.layer_ids}: wanted numbers with commas, e.g. 2,30,58") from None
    kind = foreign.kind_of(source)
    foreign.check_destination(source, dest, kind)
    if kind == "vocabulary":
        print(foreign.import_vocabulary(source, dest, found, args.draft_vocab_size))
    elif kind == "draft":
        foreign.import_draft(source, dest, found, layers)
    else:
        samples = foreign.source(source, args.form)
        foreign.import_samples(samples, dest, found, layer_ids=layers, talks=args.conversations)
    print(f"written to {dest}; next: eagle3nb check {dest} --verifier {args.verifier}")
    return 0


def _report(args: argparse.Namespace) -> int:
    from eagle3nb import report
    from eagle3nb.files import shown

    folders = [Path(run) for run in args.runs]
    if len(folders) > 1:
        written = report.compare(folders, Path(args.out) if args.out else None)
    elif args.out:
        raise Refused("--out is for the comparison of several runs; the report of one run lies in its directory")
    else:
        written = report.write(folders[0])
        report.refresh(folders[0].resolve().parent)
    print(shown(written))
    return 0


def _plan(args: argparse.Namespace) -> int:
    from eagle3nb import params, plan

    planned = plan.make(params.load(args.params, args.overrides), Path.cwd())
    print("\n".join(plan.lines(planned)))
    plan.check_disk(planned)
    return 0


def _export(args: argparse.Namespace) -> int:
    from eagle3nb import export

    print(export.run(args.source, args.to, args.destination, verifier=args.verifier, anyway=args.anyway))
    return 0


def _shard(args: argparse.Namespace) -> int:
    from eagle3nb import extract_hidden_states
    from eagle3nb.run import of_run_dir

    k, slash, n = args.part.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and int(n)):
        raise Refused(f"{args.part}: wanted K/N, e.g. 0/4 for the first of four parts")
    fields = of_run_dir(args.run).extract_hidden_states
    print(extract_hidden_states.run_shard(fields.model_copy(update={"run_dir": args.run}), int(k), int(n)))
    return 0


def _tiny(args: argparse.Namespace) -> int:
    from eagle3nb import tiny

    print(tiny.make(args.name, Path(args.folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
