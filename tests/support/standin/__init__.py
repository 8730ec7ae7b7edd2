"""A module made of a type stub, for contract tests of code that takes a library as an argument.

::

    class Runtime:  # a behaviour: plain Python, of the names that the stub has
        def __init__(self, logger): ...
        def deserialize_cuda_engine(self, serialized_engine): return Engine(bytes(serialized_engine))

    class Engine:
        num_io_tensors = 2
        def get_tensor_mode(self, name): return "INPUT"

    trt = stand_in(stub_of("tensorrt"), "tensorrt", {"Runtime": Runtime, "ICudaEngine": Engine})
    engine = trt.Runtime(logger).deserialize_cuda_engine(plan)  # a trt.ICudaEngine

**What the code under test sees.** Every class, enum, function and constant of the stub and nothing else, at every
level: what the stub lacks is AttributeError. Calls are checked against the stub as pybind11 would: number, names and
types of the arguments, any overload that fits; else TypeError. An attribute can be set where the stub has a setter or
a plain attribute, to a value of its type: else AttributeError, TypeError. A class without ``__init__`` in the stub
cannot be made by calling it. What the stub has and the behaviours do not is AssertionError with its name, when it is
called, read or set. What types mean is in ``annotations``: ``SupportsInt`` is any integer and no float, ``Sequence``
no text, ``Buffer`` what ``memoryview`` takes, None only where it is Optional; what is not known there accepts anything
and is listed by ``unknown_annotations(module)``.

**What a behaviour is.** A class whose public methods, properties and attributes are among the stub's for the name it
is given for: another is a ValueError when the module is made (start a helper's name with ``_``). Attributes that are
made in ``__init__`` may have any name; only those of the stub are seen. The key of a function is its name, and its
behaviour a callable. Methods get checked arguments, in the stub's order, with the stub's defaults; the parameters'
names are free. What they return or hold as an attribute is checked too: a wrong type is AssertionError, since the
behaviour is at fault.

**Objects.** The module's objects and the behaviours' are two, one for one. Code under test has ``trt.ICudaEngine``, a
behaviour has ``Engine``: arguments and results are translated, in lists, tuples and dicts too, and the same one is
always translated into the same other, as long as the module's object lives. A behaviour that returns ``Engine(...)``
makes a ``trt.ICudaEngine``; subclasses of ``Engine`` do, too. The module's object holds its behaviour, not the
reverse: so when the code under test drops the last reference, the object is gone at once, and the behaviour's
``_released()``, if it has one, is called. ``behaviour_of(object)`` is for tests.

**Users' classes** (loggers, stream readers, progress monitors) derive from classes of the stub that need no behaviour:
their methods are their own, and behaviours get their objects untranslated. As with pybind11 their ``__init__`` must
call that of the base. A behaviour calls them with ``call``, which checks the arguments by the stub, and the result.

**Enums and shapes.** Members have ``name`` and ``value`` and convert to int, and are equal to their own kind only.
Where the stub says an enum, a behaviour may return the member's name as text; where it says ``Dims``, any sequence of
integers, which becomes a ``Dims``. A behaviour gets shapes as what was passed: tuples, lists, or an object of
``Shape``. ``Behaviour`` is a base class that types ``_module``, the module, which is set on a behaviour before its
``__init__`` if the code under test makes it, and when it is first given to that code if another behaviour does.

**Buffers.** Python has no buffers of its own before 3.12: a behaviour of what is one (``IHostMemory``) derives from
bytes.
"""

from tests.support.standin.calls import Shape
from tests.support.standin.objects import Behaviour, behaviour_of, call, stand_in, unknown_annotations

__all__ = ["Behaviour", "Shape", "behaviour_of", "call", "stand_in", "unknown_annotations"]
