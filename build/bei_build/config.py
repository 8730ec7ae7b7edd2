"""Settings of a build. Defaults live here and nowhere else; the CLI makes its flags from these fields."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, get_args

from bei.artifact.reading_faults import MOST_TOKENS
from bei.artifact.validation import MOST_SEQUENCES
from bei.config.checks import check_ranges
from bei.errors import ConfigError
from bei.utils.ranges import WEEK_S, Range
from bei_build.checkpoint.heads import TASKS
from bei_build.checkpoint.remote_code import ATTENTIONS
from bei_build.spec.parts import POOLINGS
from bei_build.spec.precision import PRECISIONS
from bei_build.spec.quantization import Method
from bei_build.tokenizer.library_tokenizer import TOKENIZERS

_OF_VERIFYING = (
    "min_cosine",
    "allow_below_threshold",
    "reference",
    "verify_budget",
    "verify_retrieval",
    "keep_reference",
)


TARGETS = ("cpu", "tensorrt", "tensorrt-rtx", "cuda", "cuda-twin", "trtllm")
_TENSORRT = ("tensorrt", "tensorrt-rtx")
_ALL_TARGETS = ("auto", *TARGETS)
_QUANTIZED = ("fp8", "int8")
_PERCENTILE = 99.999
_TOKENS = Range(1, MOST_TOKENS, "tokens")
_PIXELS = Range(1, 100_000_000, "pixels")
_SEQUENCES = Range(1, MOST_SEQUENCES, "sequences")
_CALIBRATED_TARGETS = ("cpu", *_TENSORRT, "cuda", "cuda-twin")

# How an option follows what is in front of it.
_OPTION = " {option}"


def _option(
    default: object,
    text: str,
    choices: tuple[str, ...] = (),
    targets: tuple[str, ...] = _ALL_TARGETS,
    within: Range | None = None,
) -> Any:
    """A setting, for ``targets`` only. A number needs ``within``."""
    return field(default=default, metadata={"help": text, "choices": choices, "targets": targets, "within": within})


def _quantization_option(
    default: object,
    text: str,
    choices: tuple[str, ...] = (),
    targets: tuple[str, ...] = _CALIBRATED_TARGETS,
    precisions: tuple[str, ...] = _QUANTIZED,
    within: Range | None = None,
) -> Any:
    """A setting for quantized ``precisions``."""
    option = _option(default, text, choices, targets, within)
    return field(default=default, metadata={**option.metadata, "precisions": precisions})


@dataclass(frozen=True)
class BuildConfig:
    """Settings of one build. None means: as in the checkpoint's files, or as the target recommends."""

    model: str = field(
        default="", metadata={"help": "checkpoint: folder, installed package or hub id", "positional": True}
    )
    out: str | None = _option(None, "directory of the artifact (default: <name>-<target>-<precision>)")
    target: str = _option("cpu", "what to compile for; auto: this machine's GPU, else its CPU", _ALL_TARGETS)
    precision: str = _option("auto", "auto: what the device does best", ("auto", *PRECISIONS))
    name: str | None = _option(None, "name the model is served under (default: the checkpoint's)")
    revision: str | None = _option(None, "revision of the hub repository")
    task: str = _option("auto", "auto: what the checkpoint's class and files say", TASKS)
    pooling: str | None = _option(None, "pooling, in place of the checkpoint's", POOLINGS)
    normalize: bool | None = _option(None, "whether answers have unit length, in place of what the checkpoint says")
    include_prompt: bool | None = _option(
        None, "whether a prompt's tokens count in the mean, in place of what the checkpoint says"
    )
    score_tokens: tuple[str, ...] = _option(
        (), "token of a language model whose score counts, or two to compare: no,yes; more with task classify or decide"
    )
    score_labels: tuple[str, ...] = _option(
        (), "labels of a classifier by score_tokens: one for one or two of them, of more one each"
    )
    relevant_label: str | None = _option(
        None, "label that means relevant, for a classifier with two labels that is built as a reranker"
    )
    attention: str | None = _option(
        None, "which tokens see each other, where the checkpoint brings code of its own", ATTENTIONS
    )
    adapter: str | None = _option(
        None,
        "adapter to merge, where the checkpoint has one for each of its tasks; none: the weights without any (default: "
        "all of them, chosen by each request)",
    )
    lora: tuple[str, ...] = _option(
        (), "NAME=PATH of a LoRA adapter that PEFT saved, which requests choose as MODEL:NAME; may be repeated"
    )
    tokenizer: str = _option(
        "auto",
        "auto: what transformers' class makes of the tokenizer's files, and BOS or EOS that they ask for by name; "
        "transformers: without those; file: tokenizer.json as it stands",
        TOKENIZERS,
    )
    route: str | None = _option(
        None, "route of the checkpoint's Router to build, where its modules differ for queries and documents"
    )
    images: bool = _option(True, "build the image tower too, where the checkpoint has one")
    max_image_pixels: int | None = _option(
        None,
        "most pixels of an image that keeps its proportions, fewer than the checkpoint says",
        within=_PIXELS,
    )
    texts: bool = _option(True, "build the text tower too, where the checkpoint has one beside its image tower")
    token_embeddings: bool = _option(False, "give every token's state too: late chunking, /embed_all")
    rerank_prefix: str = _option("", "text in front of a pair, tokenized by itself")
    rerank_body: str = _option("", "text of a pair, with {query}, {document} and {instruction}")
    rerank_suffix: str = _option("", "text behind a pair, tokenized by itself")
    rerank_instruction: str = _option("", "text for {instruction} if a request has none")
    classify_prefix: str = _option("", "text in front of what is classified by score_tokens, tokenized by itself")
    classify_body: str = _option("", "text of what is classified, with {text}, and {response} for the second of a pair")
    classify_suffix: str = _option("", "text behind what is classified, tokenized by itself")
    decide_body: str = _option(
        "", "text before an option that a language model decides by, with {text}, {question} and {options}"
    )
    decide_option: str = _option(_OPTION, "an option behind it, with {option}, where no score_tokens stand for options")
    prompts: dict[str, str] = field(
        default_factory=dict, metadata={"help": "prompts by name, beside the checkpoint's", "file_only": True}
    )
    default_prompt_name: str | None = _option(None, "prompt that is used if a request names none")
    max_seq_len: int | None = _option(None, "most tokens of one sequence", within=_TOKENS)
    document_length: int | None = _option(
        None, "tokens of a document in late interaction, prompt counted", within=_TOKENS
    )
    max_num_tokens: int | None = _option(None, "token budget of one batch", within=_TOKENS)
    max_batch_size: int | None = _option(None, "most sequences of one batch", within=_SEQUENCES)
    compute_capability: tuple[str, ...] = _option(
        (),
        "GPUs the artifact is for, as 89,120 for 8.9 and 12.0 (default: this machine's)",
        targets=("tensorrt-rtx", "cuda"),
    )
    attention_lowering: str = _option(
        "auto",
        "how attention is written; auto: packed on GPUs known to have a kernel for it, else padded",
        ("auto", "packed", "padded"),
        _TENSORRT,
    )
    latency_tokens: int = _option(
        512, "most tokens of a batch in the profile for single queries", targets=_TENSORRT, within=_TOKENS
    )
    latency_sequences: int = _option(
        8, "most sequences of a batch in the profile for single queries", targets=_TENSORRT, within=_SEQUENCES
    )
    hardware_compatible: bool = _option(
        False, "a plan for every GPU from Ampere on, at some cost in speed", targets=("tensorrt",)
    )
    strip_weights: bool = _option(
        False, "keep weights out of the plan: fine-tunes of one model can share it", targets=("tensorrt",)
    )
    plan_of: str | None = _option(
        None, "artifact built with --strip-weights whose plan this build takes", targets=("tensorrt",)
    )
    timing_cache: str | None = _option(
        None, "file that keeps measured kernels between builds (default: one in ~/.cache/bei)", targets=("tensorrt",)
    )
    calibration_data: str | None = _quantization_option(
        None, "file of texts to calibrate quantization with: .txt, .jsonl, .csv, .tsv (default: bei's own list)"
    )
    calibration_column: str | None = _quantization_option(
        None, "column of the calibration texts in their file (default: text)"
    )
    calibration_size: int = _quantization_option(128, "most texts to calibrate with", within=Range(1, 1_000_000))
    calibration_length: int = _quantization_option(512, "most tokens of a calibration text", within=_TOKENS)
    calibration_seed: int = _quantization_option(
        0, "seed for the choice of texts, if there are more than --calibration-size", within=Range(0, 2**63 - 1)
    )
    calibration_method: str = _quantization_option(
        "auto",
        "range of a layer's input: the largest value (max), a percentile, or what changes products least (mse); auto: "
        "max for fp8, mse for int8",
        ("auto", *get_args(Method)),
    )
    calibrate_with: str = _quantization_option(
        "engine",
        "what measures inputs: bei's own FP32 engine, or nvidia-modelopt on transformers' model",
        ("engine", "modelopt"),
    )
    calibration_percentile: float = _quantization_option(
        _PERCENTILE, "percentile for --calibration-method percentile", within=Range(0, 100, above=True)
    )
    fp8_outputs: bool = _quantization_option(
        False, "round queries, keys and values to fp8 too, for attention", targets=_TENSORRT, precisions=("fp8",)
    )
    max_highprec_layers: int | None = _quantization_option(
        None,
        "most linear layers that may be left unquantized to pass verification (default: a quarter; 0: none)",
        within=Range(0, 1_000_000),
    )
    min_cosine: float | None = _option(
        None, "fail the build below this mean cosine of any output; p1 and minimum follow", within=Range(-1, 1)
    )
    allow_below_threshold: bool = _option(False, "keep an engine that failed its verification; it is marked so")
    reference: str = _option(
        "auto", "verify against the HF model, the PyTorch module or the FP32 engine", ("auto", "hf", "module", "engine")
    )
    verify: bool = _option(True, "compare the engine with a reference; without, the certificate says so")
    verify_budget: float | None = _option(
        None,
        "seconds for verifying; held-out texts beyond them are left out, and the certificate counts them",
        within=Range(0, WEEK_S, "seconds", above=True),
    )
    verify_retrieval: bool | None = _option(
        None, "compare nDCG@10 on the bundled retrieval set too (default: for int8 and fp8)"
    )
    keep_reference: bool = _option(
        False, "keep the reference's answers, so that bei verify can ask the engine on other machines"
    )

    sign: str | None = _option(None, "PEM file of an Ed25519 private key, which signs the artifact")
    sign_passphrase: str | None = field(
        default=None,
        repr=False,
        metadata={
            "help": "passphrase of the signing key",
            "file_only": True,
            "secret": True,
        },  # flags are visible in ps
    )
    sign_passphrase_file: str | None = _option(None, "file whose first line is the passphrase of the signing key")

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("bei build needs a model: a checkpoint folder, an installed package, or a hub id.")
        for option in fields(self):  # argparse checks choices on the command line, but not in the file and environment
            value, choices = getattr(self, option.name), option.metadata.get("choices")
            if choices and value is not None and value not in choices:
                raise ConfigError(f"{option.name} must be one of {', '.join(choices)}, not {value!r}.")
        for option in fields(self):
            targets = option.metadata.get("targets", _ALL_TARGETS)
            if self.target not in targets and getattr(self, option.name) != option.default:
                only = " or ".join(targets)
                raise ConfigError(f"{option.name} is a setting of target {only}, not of {self.target}: leave it out.")
        check_ranges(self)
        self._check_quantization()
        if self.sign is None and self.sign_passphrase_file is not None:  # the variable may be set for bei sign
            raise ConfigError("sign_passphrase_file needs a signing key: set sign too, or leave it out.")
        if self.plan_of is not None and not self.strip_weights:
            raise ConfigError("plan_of takes a plan without weights: add --strip-weights, which keeps them beside it.")
        if not self.texts and not self.images:
            raise ConfigError("Without texts and images nothing is left to build: leave --no-texts or --no-images out.")
        self._check_score_tokens()
        self._check_decisions()
        self._check_rerank_template()
        _ = self.lora_paths
        if self.relevant_label is not None and self.task != "rerank":
            raise ConfigError("relevant_label needs a classifier that is built as a reranker: add --task rerank.")
        self._check_verification()

    @property
    def lora_paths(self) -> dict[str, str]:
        """The adapters of ``lora`` by name: folders, packages or hub ids. Raises ConfigError."""
        found: dict[str, str] = {}
        for entry in self.lora:
            name, _, path = entry.partition("=")
            if not name or not path:
                raise ConfigError(f"lora {entry!r} must be NAME=PATH: the name by which requests choose the adapter.")
            if name in found:
                raise ConfigError(f"lora gives the name {name!r} twice: give each adapter its own.")
            found[name] = path
        return found

    def _check_quantization(self) -> None:
        for option in fields(self):
            precisions = option.metadata.get("precisions")
            if precisions and self.precision not in precisions and getattr(self, option.name) != option.default:
                raise ConfigError(
                    f"{option.name} is a setting of quantized precisions: leave it out, or build with --precision "
                    f"{' or '.join(precisions)}."
                )
        if self.calibration_percentile != _PERCENTILE and self.calibration_method != "percentile":
            raise ConfigError("calibration_percentile needs --calibration-method percentile: set both, or neither.")
        if self.precision == "fp8" and self.strip_weights:
            raise ConfigError("strip_weights: a plan in fp8 holds scales, which are the model's own. Leave it out.")

    def _check_verification(self) -> None:
        if self.verify:
            return
        for option in fields(self):
            if option.name in _OF_VERIFYING and getattr(self, option.name) != option.default:
                raise ConfigError(f"{option.name} has no meaning without verification: leave it out, or verify.")

    def _check_score_tokens(self) -> None:
        count, classifies = len(self.score_tokens), self.task == "classify"
        if count > 2 and not classifies and self.task != "decide":
            raise ConfigError(
                f"score_tokens must be one or two tokens, such as no,yes; not {count}. With --task classify each of "
                "more is a label."
            )
        if self.score_labels and not (count and classifies):
            raise ConfigError("score_labels names what score_tokens say: add score_tokens and --task classify.")
        if self.score_labels and len(self.score_labels) != (expected := count if count > 2 else 1):
            raise ConfigError(
                f"score_labels has {len(self.score_labels)} labels, and {count} score_tokens have {expected}: name "
                "that many."
            )
        if self.classify_body and not (count and classifies):
            raise ConfigError("classify_body is for language models: add score_tokens and --task classify.")
        if self.classify_body and "{text}" not in self.classify_body:
            raise ConfigError("classify_body has no {text}: without it every input would be the same text.")
        for name in ("classify_prefix", "classify_suffix"):
            if getattr(self, name) and not self.classify_body:
                raise ConfigError(f"{name} needs a classify_body, the text with {{text}} between them.")
        if self.rerank_body and classifies:
            raise ConfigError("rerank_body is for rerankers: leave it or --task classify out.")

    def _check_decisions(self) -> None:
        if self.task != "decide":
            for name, default in (("decide_body", ""), ("decide_option", _OPTION)):
                if getattr(self, name) != default:
                    raise ConfigError(f"{name} is for language models that decide: add --task decide, or leave it out.")
            return
        if self.rerank_body:
            raise ConfigError("rerank_body is for rerankers: leave it or --task decide out.")
        slots = ("{text}", "{question}", *(["{options}"] if self.score_tokens else []))
        if missing := [slot for slot in slots if slot not in self.decide_body]:
            raise ConfigError(
                f"--task decide needs a decide_body, what the model reads before it answers, and {missing[0]} in it: "
                "without it, a language model would not know what is asked. Leave --task out for Laya, which reads a "
                "form of its own."
            )
        if len(self.score_tokens) == 1:
            raise ConfigError("A single one of score_tokens leaves nothing to decide: name one for each option.")
        if self.score_tokens and self.decide_option != _OPTION:
            raise ConfigError("decide_option is read where no score_tokens stand for options: leave one of both out.")
        if "{option}" not in self.decide_option:
            raise ConfigError("decide_option has no {option}: without it every option would be the same text.")

    def _check_rerank_template(self) -> None:
        missing = [name for name in ("{query}", "{document}") if name not in self.rerank_body]
        if self.rerank_body and missing:
            raise ConfigError(f"rerank_body has no {missing[0]}: without it every pair would be the same text.")
        for name in ("rerank_prefix", "rerank_suffix", "rerank_instruction"):
            if getattr(self, name) and not self.rerank_body:
                raise ConfigError(f"{name} needs a rerank_body, the text of a pair with {{query}} and {{document}}.")
        if self.rerank_instruction and "{instruction}" not in self.rerank_body:
            raise ConfigError(
                "rerank_instruction is for the slot {instruction} of rerank_body: add one, or leave it out."
            )
