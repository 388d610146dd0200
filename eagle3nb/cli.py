"""The command ``eagle3nb``: run the stages, write reports, plan, export drafts, make tiny checkpoints.

Exit codes: 0 done, 1 a stage failed, 2 refused, 130 stopped.
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

    report = commands.add_parser("report", help="write report.html of a run anew")
    report.add_argument("run", help="run directory")

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
        return {"report": _report, "plan": _plan, "export": _export, "shard": _shard, "tiny": _tiny}[args.command](args)
    except Refused as error:
        print(f"eagle3nb: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("eagle3nb: stopped; what is complete is kept, run the same directory again to go on", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    from eagle3nb import report
    from eagle3nb import run as runner
    from eagle3nb.files import read_json

    try:
        folder = runner.run(
            args.params, overrides=args.overrides, run_dir=args.run_dir, runs_dir=args.runs_dir,
            first=args.first, last=args.last,
        )  # fmt: skip
    except runner.StageFailed as error:
        print(f"eagle3nb: {error}", file=sys.stderr)
        return 1
    record = read_json(folder / "run.json")
    verdict, sentence = report.judge(record)
    print(f"\n{verdict}: {sentence}")
    print("\n".join(report.headline_lines(record)))
    print(f"report: {runner.shown(folder / 'report.html')}")
    return 0


def _report(args: argparse.Namespace) -> int:
    from eagle3nb import report
    from eagle3nb.run import shown

    print(shown(report.write(Path(args.run))))
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
    if not (slash and k.isdigit() and n.isdigit() and int(n)):
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
