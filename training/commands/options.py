"""The command lines of the commands that do not train. ``--output`` names a new file or folder, and ``--run_dir`` a directory
that grows with every further call."""

from __future__ import annotations

from typing import Literal

from jsonargparse import ArgumentParser

from training.config.paths import HubName, LocalPath
from training.config.text import BleuTokenizer

Format = Literal["stock", "pruned", "masked", "gates", "onnx"]
Padding = Literal["fewest", "fastest"]
EXPERIMENTS = (
    "ablate", "one-per-layer", "by-kind", "causal", "relevance", "roles", "survival", "domains", "through-training",
)  # fmt: skip


def report_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Show runs and comparisons as one HTML page, with its pictures as PNG and SVG.")
    add = parser.add_argument
    add("runs", type=LocalPath, nargs="+", metavar="RUN", help="Directories of fit or compare.")
    add("--output", type=LocalPath, default="report.html", help="The page to write; pictures go to the folder figures.")
    help_of_roles = "The roles.csv of analyze for the model of all directories (default: that in each directory)."
    add("--roles", type=LocalPath | None, metavar="FILE", help=help_of_roles)
    return parser


def summary_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Show results as Markdown tables.")
    add = parser.add_argument
    add("runs", type=LocalPath, nargs="*", metavar="RUN", help="Directories of fit or compare.")
    add(
        "--metric",
        type=str,
        default="test_accuracy",
        help="The column of comparison.csv: a metric, with fractions in percent, or kv_bytes_per_token.",
    )
    add("--stage", type=str | None, help="The stage, such as post hoc or retrained from dense (default: all).")
    add("--costs", action="store_true", help="Show the thousands of examples for selecting heads and for retraining too.")
    add("--verdict", action="store_true", help="Show verdict.md instead of a table.")
    add(
        "--truth",
        type=Literal["programs", "methods", "facts"] | None,
        help="Show truth.csv of models whose necessary heads are known: a row for each program or each method. Or show the "
        "heads that carry facts, from interchange.csv.",
    )
    add("--methods", type=str | None, help="The methods to show, separated by commas, in this order (default: all).")
    return parser


def analyze_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Show the function of the heads of a trained model: roles, survival, relevance, causal classes, and the "
        "experiments of Michel et al. (2019).",
        epilog="The experiment domains needs other data of the same task, as --other_data.NAME for options of fit's data, such "
        "as --other_data.test_file FILE. After a lone -- come options of fit in place of the run's, such as "
        "-- --trainer.accelerator cpu --data.test_file FILE.",
    )
    add = parser.add_argument
    add(
        "run",
        type=LocalPath,
        metavar="RUN",
        help="A run directory of fit. For roles also a folder with a model of Transformers, for survival also a comparison.",
    )
    add("--run_dir", type=LocalPath, required=True, help="The directory to write; an earlier analysis there is extended.")
    _add_role_options(parser)
    help_of_roles = "For survival: the roles.csv of the same model (default: that in --run_dir)."
    add("--roles", type=LocalPath | None, metavar="FILE", help=help_of_roles)
    add(
        "--weights",
        type=Literal["dense", "pruned"],
        default="dense",
        help="For roles of a run: the model at the end of fine-tuning, or the pruned model at the end.",
    )
    add(
        "--experiments",
        type=str | None,
        help=f"Some of {', '.join(EXPERIMENTS)}, separated by commas (default: roles of a folder, roles and survival of a run "
        "with trees, otherwise ablate, one-per-layer and by-kind).",
    )
    return parser


def _add_role_options(parser: ArgumentParser) -> None:
    """Add the options on the texts that roles are read from."""
    add = parser.add_argument
    add("--conllu", type=LocalPath | None, metavar="FILE", help="For roles: a treebank in CoNLL-U.")
    add(
        "--parser",
        type=HubName | None,
        metavar="NAME",
        help="For roles: a parser of the sentences of --text instead of a treebank: a pipeline of spaCy, or your own "
        "module:function.",
    )
    add(
        "--relations",
        type=str | None,
        help="For roles: the relations of the treebank, separated by commas (default: all but root, punct, and loose ones such "
        "as list and parataxis).",
    )
    add(
        "--text",
        type=LocalPath | None,
        metavar="FILE",
        help="For roles: texts that show which tokens are rare, one on each line (default: the run's training data).",
    )
    help_of_coref = "For roles: the table of GAP, or sentences of WinoBias."
    add("--coref", type=LocalPath | None, metavar="FILE", help=help_of_coref)
    add("--sentences", type=int | None, help="For roles: the number of sentences to read from each file (default: all).")
    add(
        "--show",
        type=LocalPath | None,
        metavar="FILE",
        help="For roles: sentences whose attention is shown, one on each line (default: some of the treebank).",
    )
    add(
        "--maps",
        type=str | None,
        metavar="HEADS",
        help="For roles: the heads to draw the attention of in these sentences, such as encoder.2.8,encoder.0.1.",
    )


def sweep_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Run a W&B sweep file on this machine. The same command continues a stopped sweep.",
        epilog="Arguments after -- go to every trial, such as: -- --model.backbone DIR --data.train_file FILE",
    )
    add = parser.add_argument
    add("file", type=LocalPath, metavar="FILE", help="A sweep file, such as configs/sweeps/lambda.yaml.")
    add("--run_dir", type=LocalPath | None, help="The directory to write (default: runs/sweeps/NAME).")
    add("--jobs", type=int, default=1, help="The number of trials at a time; they share the cores.")
    add("--trials", type=int | None, help="The number of trials (default: run_cap of the file, or the whole grid).")
    add("--timeout_minutes", type=float | None, help="The time after which a trial is ended and counted as failed.")
    add(
        "--storage",
        type=str | None,
        metavar="URL",
        help="A database for the trials, such as postgresql://USER@HOST/NAME (default: a file in --run_dir). With it several "
        "machines work on one sweep, each with its own --run_dir.",
    )
    add("--seed", type=int, default=0, help="The seed of the search. Trials have the seed of their configuration.")
    return parser


def export_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Write the model of a finished run in another form.",
        epilog="--refit, and --ranking with a score that the run did not compare, read the run's data. If the data are "
        "elsewhere now, give options of fit after a lone --, such as -- --data.train_file FILE.",
    )
    add = parser.add_argument
    add("run", type=LocalPath, metavar="RUN", help="A run directory of fit, or a .ckpt in its checkpoints.")
    add(
        "--format",
        type=Format,
        default="pruned",
        help="stock: heads gone, plain Transformers, if every layer keeps the same number or with --pad_heads; "
        "pruned: heads gone, any mask; masked: dense shape; gates: the gates alone; onnx: for ONNX Runtime.",
    )
    add("--output", type=LocalPath | None, help="The directory to write (default: RUN with the options of the export).")
    add(
        "--pad_heads",
        type=Padding | None,
        nargs="?",
        const="fewest",
        help="With --format stock, add heads of zeros so that all layers have the same size. fewest adds as few as possible; "
        "fastest chooses the size with the least time in the run's latency table. The model card states their cost.",
    )
    add(
        "--push_to_hub",
        type=str | None,
        metavar="USER/NAME",
        help="Upload the directory to this repository of the Hugging Face Hub, with the token of hf auth login or HF_TOKEN.",
    )
    add("--private", action="store_true", help="With --push_to_hub, make a new repository private.")
    add(
        "--budget",
        type=int | float | dict[str, int | float] | None,
        help="The heads to keep: a count, a fraction, or one of these per kind (default: the ranking's own mask in the run).",
    )
    add(
        "--ranking",
        type=str | None,
        help="The ranking of the heads: one that the run compared, or with --budget any score, such as obs (default: the "
        "method of the kept heads).",
    )
    add(
        "--minimum_per_layer",
        type=int | None,
        help="With --budget, the heads that every layer keeps (default: as in the run). The stock format needs the same number "
        "in every layer: a budget of this number times the layers gives that.",
    )
    add(
        "--refit",
        action="store_true",
        help="Take the dense weights of the end of fine-tuning, and refit those behind the heads to the mask by least squares, "
        "without training. The run's data are read again.",
    )
    add("--measure", type=list[int], default=[1, 8, 32], help="The batch sizes to measure latency at; [] for none.")
    add("--length", type=int, default=128, help="The tokens per example of the check and the measurement.")
    return parser


def convert_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Make a checkpoint whose heads Transformers 4 pruned load again under Transformers 5.")
    add = parser.add_argument
    help_of_old = "A checkpoint of Transformers 4 with pruned_heads in its config.json."
    add("old_dir", type=LocalPath, metavar="OLD_DIR", help=help_of_old)
    add("--output", type=LocalPath | None, help="The directory to create (default: OLD_DIR-converted).")
    add(
        "--form",
        type=Literal["pruned", "masked"],  # no family that Transformers 4 pruned has a stock class with fewer heads
        default="pruned",
        help="pruned: heads gone, loads with trust_remote_code=True; masked: dense with zeros, loads with stock classes.",
    )
    add("--allow_pickle", action="store_true", help="Read pytorch_model.bin too, without running code from it.")
    return parser


def translate_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Translate a file with one or more systems.")
    add = parser.add_argument
    help_of_systems = "Folders of models or runs; the first is the baseline."
    add("systems", type=LocalPath, nargs="+", metavar="SYSTEM", help=help_of_systems)
    add("--source", type=LocalPath, required=True, help="A text file with a sentence on each line; .gz is unpacked.")
    add("--source_prefix", type=str, default="", help="The text before every source (T5).")
    for side in ("source", "target"):
        text = f"The {side} language of multilingual models, such as en_XX (default: the system's own)."
        add(f"--{side}_language", type=str | None, help=text)
    add("--reference", type=LocalPath | None, help="The reference translation, for BLEU and chrF.")
    add("--beams", type=int, default=4, help="The number of beams; 1 for greedy decoding.")
    add("--length_penalty", type=float, default=1.0, help="The power of the length that divides a beam's score.")
    add("--max_length", type=int, default=128, help="The longest translation in tokens, at most the model's positions.")
    add("--batch_size", type=int, default=64, help="The number of sentences per batch.")
    help_of_words = "The tokenizer of BLEU; zh for Chinese, ja-mecab for Japanese."
    add("--bleu_tokenize", type=BleuTokenizer, default="13a", help=help_of_words)
    add("--samples", type=int, default=1000, help="The number of samples of the bootstrap.")
    add("--device", type=str, default="cpu", help="The device, such as cuda.")
    add("--output", type=LocalPath | None, help="The folder to write translations and scores into.")
    return parser
