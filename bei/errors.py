"""Every error that bei raises on purpose, in one tree. ``bei.server.http.errors`` maps them to HTTP statuses.

A message says what is wrong and then what to do. ``code`` is stable: clients and scripts may match on it.

    BeiError
    ├── ConfigError                 a flag, environment variable or YAML key is wrong
    ├── MissingDependencyError      a Python package of an extra is not installed
    ├── BrokenDependencyError       a Python package is installed and cannot be loaded
    ├── LibraryVersionError         a compiler's library is of a version that bei does not know
    ├── DeviceNotFoundError         this machine has no such device
    ├── ForkedProcessError          a fork has not copied the threads of what is asked
    ├── DiskFullError               there is no space left where something is to be written
    ├── RecordUnreadableError       what a server has kept of a file or a batch is damaged
    ├── ProcessDiedError            a process of the server ended before it had done what it was to do
    ├── JobError                    a bulk job cannot be done
    │   ├── JobInputError           its input files cannot be found or read
    │   ├── JobDiffersError         another job has written into the folder
    │   └── BadRowError             a row has no answer, and the job is to end then
    ├── BenchError                  a server cannot be measured
    │   └── ComparisonError         two results of bei bench do not measure the same
    ├── BuildError
    │   ├── CheckpointError         the checkpoint cannot be found or read
    │   │   ├── CheckpointNotFoundError
    │   │   │   └── HubUnreachableError     it is not here, and the hub could not be asked
    │   │   ├── UnsupportedArchitectureError
    │   │   ├── WeightsError        missing, extra or misshapen tensors
    │   │   └── TokenizerError      the tokenizer does not fit the checkpoint
    │   ├── CompileError            the target's compiler refused the graph
    │   └── VerificationError       the engine is too far from the reference
    ├── ArtifactError
    │   ├── ArtifactFileMissingError
    │   ├── ArtifactFileUnlistedError   a file lies beside the engine's that the manifest does not know
    │   ├── ArtifactHashMismatchError
    │   ├── ArtifactManifestError   the manifest is not readable as this schema, or says what cannot be
    │   ├── ArtifactSchemaNewerError
    │   ├── ArtifactSignatureError  the signature cannot be read, or is not of this artifact
    │   ├── ArtifactUntrustedError  no signature by a trusted key, and one is required
    │   ├── ArtifactWrongTargetError
    │   ├── ArtifactWrongDeviceError
    │   ├── ArtifactWrongVersionError   another version of the compiler's library made it
    │   └── SwapRefusedError        it cannot take the place of the one that is served
    ├── RequestError                the client's request is wrong; nothing was computed for it
    │   ├── InvalidRequestError
    │   │   ├── MalformedRequestError   not JSON, or a field is not of its type
    │   │   │   └── InvalidTextError    a string is not all characters
    │   │   ├── InvalidImageError       it cannot be read, or is too large
    │   │   ├── EmptyInputError         no inputs, or an empty one
    │   │   └── InputTooLongError       longer than it may be, and not to be cut
    │   ├── UnauthorizedError       no API key
    │   │   └── UnknownApiKeyError      one that is not known here
    │   ├── ForbiddenError          the API key is not for this
    │   ├── TaskNotSupportedError   the model has no head for it
    │   ├── ModelNotFoundError
    │   ├── PayloadTooLargeError
    │   ├── AnswerTooLargeError
    │   ├── EncodingNotSupportedError
    │   ├── NotAcceptableError      the client accepts no form that the answer could have
    │   ├── HeadersTooLargeError
    │   ├── RequestTimeoutError     the client took too long to send its request
    │   ├── RouteNotFoundError
    │   ├── ObjectNotFoundError     no file or batch of this API key has the id
    │   ├── ConflictError           not in the state that the file or batch is in
    │   ├── QuotaExceededError      more files, bytes or batches than an API key may have
    │   └── MethodNotAllowedError
    ├── OverloadedError             too much waits; come back after ``retry_after_s``
    │   └── RateLimitedError        more comes with one API key than it may bring
    ├── DeadlineExceededError       the answer would come, or would have come, too late
    ├── TooManyConnectionsError     and none of them is idle
    ├── NotReadyError               a model does not answer as it did at build time
    ├── ShuttingDownError           the server drains; ask another replica
    └── EngineError                 the engine failed on this input
        ├── EngineDeadError         the engine does not work any more; ask another replica
        ├── EngineDiedError         the process of the engine died while it ran this input
        └── NonFiniteOutputError    the engine answered NaN or Inf
"""

from __future__ import annotations

from bei.printable import one_line


class BeiError(Exception):
    """Root of the tree. ``str(error)`` is for people, in one printable line of at most 2,000 characters, whatever it
    quotes; ``code`` is for programs."""

    code = "bei_error"

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class ConfigError(BeiError):
    """A setting is unknown, malformed or contradicts another one."""

    code = "config_invalid"


class MissingDependencyError(BeiError):
    """A package that this operation needs is not installed. ``remedy`` is the command that installs it."""

    code = "dependency_missing"

    def __init__(self, package: str, extra: str | None, purpose: str, remedy: str = "") -> None:
        self.remedy = remedy or f"pip install 'bei[{extra}]'"
        super().__init__(f"{purpose} needs the Python package {package!r}: {self.remedy}")


class BrokenDependencyError(BeiError):
    """A package that this operation needs is installed and cannot be loaded: itself, or something that it needs in
    turn. ``reason`` is what it says."""

    code = "dependency_broken"

    def __init__(self, package: str, extra: str | None, purpose: str, reason: str, remedy: str = "") -> None:
        again = remedy or f"pip install 'bei[{extra}]'"
        self.remedy = f"pip uninstall {package}, then {again}"
        super().__init__(
            f"{purpose} needs the Python package {package!r}, which is installed and cannot be loaded ({reason}): mend "
            f"that, or install it anew ({self.remedy})."
        )


class LibraryVersionError(BeiError):
    """A compiler's library is installed in a version that bei does not know."""

    code = "library_version"


class DeviceNotFoundError(BeiError):
    """This machine has no device of the kind that was asked for, or no driver for it."""

    code = "device_not_found"


class ForkedProcessError(BeiError):
    """An in-process model is used in a fork of the process that made it."""

    code = "forked_process"


class DiskFullError(BeiError):
    """A disk is full. The message names the folder."""

    code = "disk_full"


class RecordUnreadableError(BeiError):
    """What the server has kept of a file or a batch is damaged, or of another version."""

    code = "record_unreadable"


class ProcessDiedError(BeiError):
    """A process of a server in several processes ended, or is not there, when something was to be done by it."""

    code = "process_died"


class JobError(BeiError):
    """A bulk job cannot be done."""

    code = "job_failed"


class JobInputError(JobError):
    """The input files of a bulk job cannot be found or read."""

    code = "job_input"


class JobDiffersError(JobError):
    """The output folder has another job's files, or this job's from before its inputs, model or options changed."""

    code = "job_differs"


class BadRowError(JobError):
    """A row of the input has no answer, and ``--on-error fail`` ends the job then."""

    code = "job_bad_row"


class BenchError(BeiError):
    """A server cannot be measured: it is not there, refuses the first request, or answers something else."""

    code = "bench_failed"


class ComparisonError(BenchError):
    """Two results cannot be compared; the message names what differs."""

    code = "bench_incomparable"


class BuildError(BeiError):
    """A build could not be completed."""

    code = "build_failed"


class CheckpointError(BuildError):
    """The checkpoint is malformed."""

    code = "checkpoint_invalid"


class CheckpointNotFoundError(CheckpointError):
    """No folder, installed package or hub repository answers to the name."""

    code = "checkpoint_not_found"


class HubUnreachableError(CheckpointNotFoundError):
    """The checkpoint is not on this machine, and the hub could not be asked whether it has it."""

    code = "hub_unreachable"


class UnsupportedArchitectureError(CheckpointError):
    """No family file describes this architecture."""

    code = "architecture_unsupported"


class WeightsError(CheckpointError):
    """Tensors are missing, extra, of the wrong shape, or in a refused format."""

    code = "weights_invalid"


class TokenizerError(CheckpointError):
    """The tokenizer is missing, unreadable or does not fit the embedding table."""

    code = "tokenizer_invalid"


class CompileError(BuildError):
    """A target's compiler refused the graph or is not able to run here."""

    code = "compile_failed"


class VerificationError(BuildError):
    """The compiled engine differs from the reference by more than the threshold."""

    code = "verification_failed"


class ArtifactError(BeiError):
    """An artifact cannot be served."""

    code = "artifact_invalid"


class ArtifactFileMissingError(ArtifactError):
    """A file of the artifact is not there."""

    code = "artifact_file_missing"


class ArtifactFileUnlistedError(ArtifactError):
    """A file that the manifest does not list lies where an engine could read it."""

    code = "artifact_file_unlisted"


class ArtifactHashMismatchError(ArtifactError):
    """A file's size or sha256 is not the one in the manifest."""

    code = "artifact_hash_mismatch"


class ArtifactManifestError(ArtifactError):
    """Manifest or certificate are not valid JSON of this schema, or say what cannot be."""

    code = "artifact_manifest_invalid"


class ArtifactSchemaNewerError(ArtifactError):
    """The artifact was written by a newer bei."""

    code = "artifact_schema_newer"


class ArtifactSignatureError(ArtifactError):
    """The artifact has a signature that cannot be read, does not hold, or is of another artifact."""

    code = "artifact_signature_invalid"


class ArtifactUntrustedError(ArtifactError):
    """Only signed artifacts are to be served, and no trusted key has signed this one."""

    code = "artifact_untrusted"


class ArtifactWrongTargetError(ArtifactError):
    """The artifact's target has no engine in this installation."""

    code = "artifact_wrong_target"


class ArtifactWrongDeviceError(ArtifactError):
    """The artifact was compiled for a device that this machine does not have."""

    code = "artifact_wrong_device"


class ArtifactWrongVersionError(ArtifactError):
    """The artifact was compiled by another version of a library than the one that is installed."""

    code = "artifact_wrong_version"


class SwapRefusedError(ArtifactError):
    """The artifact may not take the place of the one that is served: clients rely on that, or both do not fit."""

    code = "swap_refused"


class RequestError(BeiError):
    """The client's request is at fault. ``param`` names the field, if one is to blame."""

    code = "invalid_request"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(RequestError):
    """A field is missing, of the wrong type or out of range."""


class MalformedRequestError(InvalidRequestError):
    """The body cannot be read, or a field of it is not of its type."""


class InvalidTextError(MalformedRequestError):
    """A string has half of a surrogate pair, which is no character."""

    code = "invalid_text"


class InvalidImageError(InvalidRequestError):
    """An image cannot be read, is too large, or is of a form that is not read."""

    code = "invalid_image"


class EmptyInputError(InvalidRequestError):
    """There is nothing to compute: no inputs, or an empty one."""


class InputTooLongError(InvalidRequestError):
    """An input has more tokens than it may have, and is not to be cut."""


class UnauthorizedError(RequestError):
    """The request has no API key, or one that the server does not know."""

    code = "unauthorized"


class UnknownApiKeyError(UnauthorizedError):
    """The server does not know the request's API key. ``code`` is OpenAI's word."""

    code = "invalid_api_key"


class ForbiddenError(RequestError):
    """The request's API key is not for what the request asks."""

    code = "forbidden"


class TaskNotSupportedError(RequestError):
    """The served model cannot do what the route asks; the message names what it can do."""

    code = "task_not_supported"


class ModelNotFoundError(RequestError):
    """No served model has this name."""

    code = "model_not_found"


class PayloadTooLargeError(RequestError):
    """The body is larger than the server accepts."""

    code = "payload_too_large"


class AnswerTooLargeError(RequestError):
    """The answer would be larger than the server gives."""

    code = "answer_too_large"


class EncodingNotSupportedError(RequestError):
    """The body has a Content-Encoding that the server does not decode."""

    code = "encoding_not_supported"


class NotAcceptableError(RequestError):
    """The client accepts no form that the answer could have."""

    code = "not_acceptable"


class HeadersTooLargeError(RequestError):
    """The request has more headers, or more bytes of them, than are accepted."""

    code = "headers_too_large"


class RequestTimeoutError(RequestError):
    """The client took longer to send its request than the server waits."""

    code = "request_timeout"


class RouteNotFoundError(RequestError):
    """No route has this path."""

    code = "route_not_found"


class ObjectNotFoundError(RequestError):
    """No file or batch of this client has the id."""

    code = "object_not_found"


class ConflictError(RequestError):
    """The file or batch is in a state in which this cannot be done."""

    code = "conflict"


class QuotaExceededError(RequestError):
    """The client has as many files, bytes of them or unfinished batches as it may have."""

    code = "quota_exceeded"


class MethodNotAllowedError(RequestError):
    """The route exists under another HTTP method."""

    code = "method_not_allowed"


class OverloadedError(BeiError):
    """The queue is full. ``retry_after_s`` estimates when it will have drained."""

    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimitedError(OverloadedError):
    """The API key has used up its rate. After ``retry_after_s`` this request would be accepted."""

    code = "rate_limited"


class DeadlineExceededError(BeiError):
    """The request's deadline has passed, or cannot be kept."""

    code = "deadline_exceeded"

    @classmethod
    def after(cls, waited_s: float) -> DeadlineExceededError:
        """For work that was dropped when its deadline came."""
        return cls(f"The deadline passed after {waited_s:.3f} s: allow more time, or send less at once.")


class TooManyConnectionsError(BeiError):
    """Every connection that the server may hold has a request under way."""

    code = "too_many_connections"
    retry_after_s = 1.0


class ShuttingDownError(BeiError):
    """The server has begun to drain and accepts no new work."""

    code = "shutting_down"


class NotReadyError(BeiError):
    """A model does not answer as it did at build time, or not at all."""

    code = "not_ready"


class EngineError(BeiError):
    """The engine failed on this input, alone in its batch."""

    code = "engine_failed"


class EngineDeadError(EngineError):
    """The engine's thread has died, or the engine hangs and could not be replaced. Nothing more is computed."""

    code = "engine_dead"


class EngineDiedError(EngineError):
    """The process that ran the engine died, or could not be reached; another one takes its place."""

    code = "engine_died"


class NonFiniteOutputError(EngineError):
    """The engine's answer for this input contains NaN or Inf and is withheld."""

    code = "non_finite_output"
