"""The command lines of the commands that do not train. One word for each thing: ``--output`` is what a command makes, and
``--run_dir`` a directory that grows with every further call."""

from __future__ import annotations

from typing import Literal

from jsonargparse import ArgumentParser

from training.config.data import BleuTokenizer
from training.config.paths import HubName, LocalPath

Format = Literal["stock", "remote-code", "masked", "gates", "onnx"]
ConvertedForm = Literal["pruned", "masked"]
"""None of the families that Transformers 4 pruned has a stock class with fewer heads of the same width."""
EXPERIMENTS = (
    "ablate", "one-per-layer", "by-kind", "causal", "relevance", "roles", "survival", "domains", "through-training",
)  # fmt: skip


def report_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m training report",
        description="One self-contained HTML page about runs and comparisons, and its pictures as PNG and SVG beside it.",
    )
    parser.add_argument("runs", type=LocalPath, nargs="+", metavar="RUN", help="Directories that fit or compare wrote.")
    parser.add_argument("--output", type=LocalPath, default="report.html", help="The page; pictures go to figures/ beside it.")
    parser.add_argument(
        "--roles",
        type=LocalPath | None,
        default=None,
        metavar="FILE",
        help="roles.csv of analyze about the same model as all of the directories (default: that in each, if any).",
    )
    return parser


def summary_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m training summary", description="Results as Markdown tables.")
    parser.add_argument("runs", type=LocalPath, nargs="*", metavar="RUN", help="Directories that fit or compare wrote.")
    parser.add_argument(
        "--metric",
        type=str,
        default="test_accuracy",
        help="Column of comparison.csv: a metric, whose fractions are shown in percent, or kv_bytes_per_token.",
    )
    parser.add_argument("--stage", type=str | None, default=None, help="Such as post hoc or retrained; all by default.")
    parser.add_argument(
        "--costs", action="store_true", help="Also the examples that selecting heads and retraining took, in thousands."
    )
    parser.add_argument("--verdict", action="store_true", help="What verdict.md says, instead of a table.")
    parser.add_argument(
        "--truth",
        type=Literal["programs", "methods", "facts"] | None,
        default=None,
        help="What truth.csv says, where the necessary heads are known: a row per program, or one per method. Or what "
        "interchange.csv says of the heads that carry facts.",
    )
    parser.add_argument(
        "--methods", type=str | None, default=None, help="Some methods only, separated by commas, in this order."
    )
    return parser


def analyze_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m training analyze",
        description="Show what the heads of a trained model do: roles, which of them survive, relevance, causal classes, and "
        "Michel et al.'s (2019) experiments.",
        epilog="The experiment domains needs other data of the same task: options of fit's data as --other_data.NAME, such as "
        "--other_data.test_file FILE; the rest is as in the run. After a lone -- come options of fit in place of the run's, "
        "such as -- --trainer.accelerator cpu --data.test_file FILE.",
    )
    parser.add_argument(
        "run",
        type=LocalPath,
        metavar="RUN",
        help="A run directory that fit wrote; for roles also a folder with a model of Transformers, for survival also the "
        "directory of a comparison.",
    )
    parser.add_argument(
        "--run_dir", type=LocalPath, required=True, help="Directory to write; one of an earlier analysis is added to."
    )
    _add_role_options(parser)
    parser.add_argument(
        "--roles",
        type=LocalPath | None,
        default=None,
        metavar="FILE",
        help="For survival: roles.csv of the same model (default: that in --run_dir).",
    )
    parser.add_argument(
        "--weights",
        type=Literal["dense", "pruned"],
        default="dense",
        help="For roles: of a run the model at the end of fine-tuning, or that at its end, without the heads that are gone.",
    )
    parser.add_argument(
        "--experiments",
        type=str | None,
        default=None,
        help=f"Some of {', '.join(EXPERIMENTS)}, separated by commas (default: roles of a folder, roles and survival of a run "
        "with trees, else ablate, one-per-layer and by-kind).",
    )
    return parser


def _add_role_options(parser: ArgumentParser) -> None:
    """Add the options on the texts that roles are read from."""
    parser.add_argument(
        "--conllu", type=LocalPath | None, default=None, metavar="FILE", help="For roles: a treebank in CoNLL-U."
    )
    parser.add_argument(
        "--parser",
        type=HubName | None,
        default=None,
        metavar="NAME",
        help="In place of a treebank, for the sentences of --text: a pipeline of spaCy, or module:function for a parser of "
        "your own.",
    )
    parser.add_argument(
        "--relations",
        type=str | None,
        default=None,
        help="For roles: relations of the treebank, separated by commas (default: all but loose ones, such as "
        "list and parataxis, root and punct).",
    )
    parser.add_argument(
        "--text",
        type=LocalPath | None,
        default=None,
        metavar="FILE",
        help="For roles: texts, one on each line, by which tokens are rare (default: the run's training data).",
    )
    parser.add_argument(
        "--coref", type=LocalPath | None, default=None, metavar="FILE", help="For roles: GAP's table, or sentences of WinoBias."
    )
    parser.add_argument(
        "--sentences", type=int | None, default=None, help="For roles: the first so many sentences of each file alone."
    )
    parser.add_argument(
        "--show",
        type=LocalPath | None,
        default=None,
        metavar="FILE",
        help="For roles: sentences whose attention is shown, one on each line (default: some of the treebank).",
    )
    parser.add_argument(
        "--maps",
        type=str | None,
        default=None,
        metavar="HEADS",
        help="For roles: heads whose attention is drawn in each of these sentences, such as encoder.2.8,encoder.0.1.",
    )


def sweep_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m training sweep",
        description="Run a W&B sweep file on this machine; the same command again goes on with it.",
        epilog="What follows -- goes to every trial, such as: -- --model.backbone DIR --data.train_file FILE",
    )
    parser.add_argument("file", type=LocalPath, metavar="FILE", help="Sweep file, such as configs/sweeps/lambda.yaml.")
    parser.add_argument("--run_dir", type=LocalPath | None, default=None, help="Where to write (default: runs/sweeps/NAME).")
    parser.add_argument("--jobs", type=int, default=1, help="Trials at a time; they share the cores.")
    parser.add_argument(
        "--trials", type=int | None, default=None, help="How many; by default run_cap of the file, or the whole grid."
    )
    parser.add_argument(
        "--timeout_minutes", type=float | None, default=None, help="End a trial that takes longer, and count it as failed."
    )
    parser.add_argument(
        "--storage",
        type=str | None,
        default=None,
        metavar="URL",
        help="A database for the trials, such as postgresql://USER@HOST/NAME, so that several machines, each with a --run_dir "
        "of its own, work on one sweep (default: a file in --run_dir).",
    )
    parser.add_argument("--seed", type=int, default=0, help="Of the search; trials have the seed of their configuration.")
    return parser


def export_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m training export",
        description="A finished run's model in another form.",
        epilog="--refit, and --ranking with a score that the run did not compare, read the run's data. After a lone -- come "
        "options of fit in place of the run's, such as -- --data.train_file FILE where the data are elsewhere now.",
    )
    parser.add_argument(
        "run", type=LocalPath, metavar="RUN", help="A run directory that fit wrote, or a .ckpt in its checkpoints."
    )
    parser.add_argument(
        "--format",
        type=Format,
        default="remote-code",
        help="stock: heads gone, plain Transformers, if every layer keeps the same number or with --pad_heads; "
        "remote-code: heads gone, any mask; masked: dense shape; gates: the gates alone; onnx: for ONNX Runtime.",
    )
    parser.add_argument(
        "--output",
        type=LocalPath | None,
        default=None,
        help="Directory to write (default: beside RUN, by its name and what is exported, such as RUN-remote-code-9-refit).",
    )
    parser.add_argument(
        "--pad_heads",
        action="store_true",
        help="With --format stock, heads of zeros where layers keep different numbers, so that all are equally large; the "
        "model card says what they cost.",
    )
    parser.add_argument(
        "--push_to_hub",
        type=str | None,
        default=None,
        metavar="USER/NAME",
        help="Also upload the directory to this repository of the Hugging Face Hub, with the token of hf auth login or of "
        "HF_TOKEN.",
    )
    parser.add_argument("--private", action="store_true", help="With --push_to_hub, make a new repository private.")
    _add_mask_options(parser)
    parser.add_argument("--measure", type=list[int], default=[1, 8, 32], help="Batch sizes to measure latency at; [] for none.")
    parser.add_argument("--length", type=int, default=128, help="Tokens per example of the check and the measurement.")
    return parser


def _add_mask_options(parser: ArgumentParser) -> None:
    """Add the options on the heads that stay."""
    parser.add_argument(
        "--budget",
        type=int | float | dict[str, int | float] | None,
        default=None,
        help="Heads to keep: a count, a fraction, or one of these per kind (default: the ranking's own mask in the run).",
    )
    parser.add_argument(
        "--ranking",
        type=str | None,
        default=None,
        help="Whose order of heads: a ranking that the run compared, or with --budget any score, such as obs, computed now "
        "(default: the run's own method, by log_alpha).",
    )
    parser.add_argument(
        "--minimum_per_layer",
        type=int | None,
        default=None,
        help="With --budget, heads that every layer keeps (default: as in the run). The stock format needs the same number in "
        "every layer: a budget of this number times the layers gives that.",
    )
    parser.add_argument(
        "--refit",
        action="store_true",
        help="Take the dense weights, from the end of fine-tuning, and refit those behind the heads to the mask by least "
        "squares, without training. The run's data are read again.",
    )


def convert_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m training convert",
        description="Make a checkpoint whose heads Transformers 4 pruned load again under Transformers 5.",
    )
    parser.add_argument(
        "old_dir", type=LocalPath, metavar="OLD_DIR", help="Checkpoint of Transformers 4 with pruned_heads in its config.json."
    )
    parser.add_argument(
        "--output", type=LocalPath | None, default=None, help="Directory to create (default: OLD_DIR-converted)."
    )
    parser.add_argument(
        "--form",
        type=ConvertedForm,
        default="pruned",
        help="Heads physically gone (loads with trust_remote_code=True), or dense with zeros (loads with stock classes).",
    )
    parser.add_argument(
        "--allow_pickle", action="store_true", help="Also read pytorch_model.bin, without running code from it."
    )
    return parser


def translate_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m training translate", description="Translate a file with one or more systems.")
    parser.add_argument(
        "systems", type=LocalPath, nargs="+", metavar="SYSTEM", help="Folders of models or runs; the first is the baseline."
    )
    parser.add_argument(
        "--source", type=LocalPath, required=True, help="Text file with a sentence on each line; .gz is unpacked."
    )
    parser.add_argument("--source_prefix", type=str, default="", help="Text before every source (T5).")
    for side in ("source", "target"):
        text = f"{side.capitalize()} language of multilingual models, such as en_XX (default: the system's own)."
        parser.add_argument(f"--{side}_language", type=str | None, default=None, help=text)
    parser.add_argument("--reference", type=LocalPath | None, default=None, help="Its translation, for BLEU and chrF.")
    parser.add_argument("--beams", type=int, default=4, help="1 for greedy decoding.")
    parser.add_argument("--length_penalty", type=float, default=1.0, help="Power of the length that divides a beam's score.")
    parser.add_argument(
        "--max_length", type=int, default=128, help="Longest translation in tokens, as far as the model has positions."
    )
    parser.add_argument("--batch_size", type=int, default=64, help="Sentences per batch.")
    parser.add_argument(
        "--bleu_tokenize",
        type=BleuTokenizer,
        default="13a",
        help="How BLEU finds words; zh for Chinese, ja-mecab for Japanese.",
    )
    parser.add_argument("--samples", type=int, default=1000, help="Of the bootstrap.")
    parser.add_argument("--device", type=str, default="cpu", help="Such as cuda.")
    parser.add_argument("--output", type=LocalPath | None, default=None, help="Folder to write translations and scores into.")
    return parser
