"""The stand-in's laws, over a small stub."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.standin import Behaviour, behaviour_of, call, stand_in, unknown_annotations

STUB = '''
from __future__ import annotations
import collections.abc
import typing

class Speed:
    SLOW: typing.ClassVar[typing.Annotated[Speed, 1]]
    FAST: typing.ClassVar[typing.Annotated[Speed, 4]]
    __members__: typing.ClassVar[dict[str, Speed]]
    def __int__(self) -> int: ...
    def __lt__(self, other: typing.Any) -> bool: ...

class Color:
    RED: typing.ClassVar[typing.Annotated[Color, 1]]
    __members__: typing.ClassVar[dict[str, Color]]

class Dims:
    def __init__(self, shape: collections.abc.Sequence[typing.SupportsInt] = ()) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: typing.SupportsInt) -> int: ...

class IListener:
    """What users derive from."""
    class Kind:
        GOOD: typing.ClassVar[typing.Annotated[IListener.Kind, 0]]
        __members__: typing.ClassVar[dict[str, IListener.Kind]]
    GOOD: typing.ClassVar[typing.Annotated[IListener.Kind, 0]]
    def __init__(self) -> None: ...
    def heard(self, kind: IListener.Kind, words: str) -> bool: ...

class Listener(IListener):
    Kind = IListener.Kind
    def __init__(self, least: IListener.Kind = IListener.Kind.GOOD) -> None: ...

class Car:
    limit: typing.ClassVar[int]
    seats: int
    color: Color
    @property
    def speed(self) -> Speed: ...
    @property
    def price(self) -> float: ...
    @price.setter
    def price(self, arg1: typing.SupportsFloat) -> None: ...
    def __init__(self, listener: IListener) -> None: ...
    def __len__(self) -> int: ...
    def drive(self, to: str, speed: Speed = Speed.SLOW, hours: typing.SupportsInt = 1) -> bool: ...
    @typing.overload
    def load(self, box: typing.SupportsInt) -> int: ...
    @typing.overload
    def load(self, boxes: collections.abc.Sequence[typing.SupportsInt], firm: bool) -> list[int]: ...
    def engine(self) -> Engine | None: ...
    def engines(self) -> list[Engine]: ...
    def swap(self, engine: Engine) -> Engine: ...
    def set_size(self, size: Dims | collections.abc.Sequence[typing.SupportsInt]) -> None: ...
    def size(self) -> Dims: ...
    def papers(self, data: typing_extensions.Buffer) -> Memory: ...
    def note(self, text: str | None) -> None: ...
    def strange(self, thing: decimal.Decimal) -> None: ...
    @staticmethod
    def wheels() -> int: ...

class Engine:
    @property
    def power(self) -> int: ...

class Memory:
    @property
    def nbytes(self) -> int: ...

def start(car: Car) -> str: ...
def stop() -> None: ...

best: typing.Annotated[Speed, 4]
__version__: typing.Annotated[str, '1.2']
'''


class CarBehaviour(Behaviour):
    seats = 4
    price = 1.0

    def __init__(self, listener: Any) -> None:
        self._listener = listener
        self._engine = EngineBehaviour(90)
        self._size: Any = ()
        self._drives: list[Any] = []

    @property
    def speed(self) -> str:
        return "FAST"

    def __len__(self) -> int:
        return 5

    def drive(self, to: str, speed: Any, hours: int) -> Any:
        self._drives.append((to, speed, hours))
        return call(self._listener, "heard", "GOOD", to) if to != "nowhere" else "no"

    def load(self, what: Any, firm: bool = False) -> Any:
        return [*what] if firm else what

    def engine(self) -> Any:
        return self._engine

    def engines(self) -> list[Any]:
        return [self._engine, EngineBehaviour(1)]

    def swap(self, engine: Any) -> Any:
        self._engine, old = engine, self._engine
        return old

    def set_size(self, size: Any) -> None:
        self._size = tuple(size)

    def size(self) -> Any:
        return self._size

    def papers(self, data: Any) -> Any:
        return MemoryBehaviour(data)

    def note(self, words: Any) -> None: ...

    def strange(self, thing: Any) -> None: ...

    @staticmethod
    def wheels() -> int:
        return 4


class EngineBehaviour:
    released: list[int]

    def __init__(self, power: int) -> None:
        self.power = power


class MemoryBehaviour(bytes):
    @property
    def nbytes(self) -> int:
        return len(self)


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    path = tmp_path / "cars.pyi"
    path.write_text(STUB)
    return path


@pytest.fixture
def cars(stub: Path) -> Any:
    behaviours: dict[str, Callable[..., Any]] = {
        "Car": CarBehaviour,
        "Engine": EngineBehaviour,
        "Memory": MemoryBehaviour,
        "start": lambda car: f"{car.seats} seats",
    }
    return stand_in(stub, "cars", behaviours)


@pytest.fixture
def car(cars: Any) -> Any:
    return cars.Car(listener_of(cars))


def listener_of(cars: Any) -> Any:
    class Listener(cars.IListener):  # type: ignore[misc]
        def __init__(self) -> None:
            cars.IListener.__init__(self)
            self.words: list[Any] = []

        def heard(self, kind: Any, words: str) -> bool:
            self.words.append((kind, words))
            return True

    return Listener()


# Names.


def test_a_module_has_what_its_stub_has_and_nothing_else(cars: ModuleType) -> None:
    declared = re.findall(r"^(?:class|def) (\w+)|^(\w+):", STUB, re.MULTILINE)
    names = {name for pair in declared for name in pair if name}
    assert {name for name in vars(cars) if not name.startswith("__")} == names - {"__version__"}
    assert vars(cars)["__version__"] == "1.2"


@pytest.mark.parametrize("name", ["Bus", "Speed.FASTER", "IListener.Kind.BAD", "Car.fly", "Car.Kind"])
def test_what_the_stub_lacks_is_an_attribute_error(cars: Any, name: str) -> None:
    *path, last = name.split(".")
    owner = cars
    for part in path:
        owner = getattr(owner, part)
    with pytest.raises(AttributeError):
        getattr(owner, last)


def test_an_object_has_nothing_but_what_the_stub_declares(car: Any) -> None:
    with pytest.raises(AttributeError):
        car._engine  # noqa: B018
    with pytest.raises(AttributeError, match="'Car' object has no attribute 'fly'"):
        car.fly()


def test_what_has_no_behaviour_says_its_name(stub: Path) -> None:
    class Car:
        def __init__(self, listener: Any) -> None: ...

    cars: Any = stand_in(stub, "cars", {"Car": Car})
    car = cars.Car(listener_of(cars))
    with pytest.raises(AssertionError, match=r"cars\.Car\.drive has no behaviour"):
        car.drive("home")
    with pytest.raises(AssertionError, match=r"cars\.Car\.seats has no behaviour"):
        car.seats  # noqa: B018
    with pytest.raises(AssertionError, match=r"cars\.Car\.seats has no behaviour"):
        car.seats = 5
    with pytest.raises(AssertionError, match=r"cars\.Car\.limit has no behaviour"):
        cars.Car.limit  # noqa: B018
    with pytest.raises(AssertionError, match=r"cars\.Car\.wheels has no behaviour"):
        cars.Car.wheels()
    with pytest.raises(AssertionError, match=r"cars\.stop has no behaviour"):
        cars.stop()
    with pytest.raises(AssertionError, match=r"cars\.IListener has no behaviour"):
        cars.IListener()


@pytest.mark.parametrize(
    ("behaviours", "message"),
    [
        ({"Bus": object}, "no class or function Bus"),
        ({"Speed": object}, "no class or function Speed"),
        ({"Car": lambda: None}, "is a class"),
        ({"Car": type("Flying", (), {"fly": lambda self: None, "_help": 1})}, "cars.Car has no fly, for which Flying"),
        ({"Engine": EngineBehaviour, "Memory": EngineBehaviour}, "cars.Memory has no power|same behaviour"),
    ],
)
def test_a_behaviour_that_the_stub_lacks_is_refused(
    stub: Path, behaviours: dict[str, Callable[..., Any]], message: str
) -> None:
    if "Memory" in behaviours:
        behaviours = {name: type("Empty", (), {}) for name in behaviours}
        behaviours["Memory"] = behaviours["Engine"]
    with pytest.raises(ValueError, match=message):
        stand_in(stub, "cars", behaviours)


# Calls.


@pytest.mark.parametrize(
    ("call_it", "reason"),
    [
        (lambda cars, car: car.drive(), "missing a required argument: 'to'"),
        (lambda cars, car: car.drive("a", cars.Speed.FAST, 1, 2), "too many positional arguments"),
        (lambda cars, car: car.drive("a", hour=1), "unexpected keyword argument 'hour'"),
        (lambda cars, car: car.drive(7), "to is int 7"),
        (lambda cars, car: car.drive(b"a"), "to is bytes"),
        (lambda cars, car: car.drive("a", 4), "speed is int 4"),
        (lambda cars, car: car.drive("a", cars.Color.RED), "speed is Color"),
        (lambda cars, car: car.drive("a", hours=1.5), "hours is float 1.5"),
        (lambda cars, car: car.drive("a", hours="2"), "hours is str '2'"),
        (lambda cars, car: car.load([1, "2"], True), "boxes is list"),
        (lambda cars, car: car.load("12", True), "boxes is str"),
        (lambda cars, car: car.load([1], 1), "firm is int 1"),
        (lambda cars, car: car.swap(None), "engine is NoneType"),
        (lambda cars, car: car.swap(car), "engine is Car"),
        (lambda cars, car: car.set_size((1, 2.5)), "size is tuple"),
        (lambda cars, car: car.papers("text"), "data is str"),
        (lambda cars, car: car.note(3), "text is int"),
        (lambda cars, car: cars.start("car"), "car is str"),
        (lambda cars, car: cars.stop(1), "too many positional"),
        (lambda cars, car: cars.Car(), "missing a required argument: 'listener'"),
        (lambda cars, car: cars.Car(car), "listener is Car"),
        (lambda cars, car: car[0], "not subscriptable"),
    ],
)
def test_a_call_that_the_stub_does_not_allow_is_a_type_error(
    cars: Any, car: Any, call_it: Callable[[Any, Any], Any], reason: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(reason)):
        call_it(cars, car)


def test_arguments_reach_the_behaviour_with_the_stubs_defaults(cars: Any, car: Any) -> None:
    assert car.drive("a")
    assert car.drive("b", hours=3)
    assert car.drive(to="c", speed=cars.Speed.FAST)
    slow, fast = cars.Speed.SLOW, cars.Speed.FAST
    assert behaviour_of(car)._drives == [("a", slow, 1), ("b", slow, 3), ("c", fast, 1)]


def test_any_overload_may_fit(car: Any) -> None:
    assert car.load(3) == 3
    assert car.load([1, 2], firm=True) == [1, 2]
    assert car.load(boxes=(1,), firm=True) == [1]


def test_a_typo_is_a_type_error_also_where_there_is_no_behaviour(stub: Path) -> None:
    cars: Any = stand_in(stub, "cars", {})
    with pytest.raises(TypeError, match="too many positional"):
        cars.stop(1)


def test_a_behaviour_that_answers_wrongly_is_at_fault(car: Any, stub: Path) -> None:
    with pytest.raises(AssertionError, match=r"behaviour of cars\.Car\.drive gave str 'no', the stub says bool"):
        car.drive("nowhere")

    class Car:
        seats = "four"

        def __init__(self) -> None: ...  # takes no listener

        def note(self, a: Any, b: Any) -> None: ...

    cars: Any = stand_in(stub, "cars", {"Car": Car})
    with pytest.raises(AssertionError, match=r"behaviour of cars\.Car\.__init__ does not take its arguments"):
        cars.Car(listener_of(cars))
    Car.__init__ = lambda self, listener: None  # type: ignore[method-assign, assignment, misc]
    with pytest.raises(AssertionError, match=r"cars\.Car\.note does not take its arguments"):
        cars.Car(listener_of(cars)).note("a")
    with pytest.raises(AssertionError, match=r"cars\.Car\.seats gave str 'four'"):
        cars.Car(listener_of(cars)).seats  # noqa: B018


def test_static_methods_functions_and_constants(cars: Any, car: Any) -> None:
    assert cars.Car.wheels() == car.wheels() == 4
    assert cars.start(car) == "4 seats"
    assert cars.best is cars.Speed.FAST
    assert len(car) == 5


# Attributes.


def test_attributes_are_read_and_set_as_the_stub_says(cars: Any, car: Any) -> None:
    assert (car.seats, car.price, car.speed) == (4, 1.0, cars.Speed.FAST)
    car.seats, car.price = 5, 2
    assert (car.seats, car.price) == (5, 2)
    with pytest.raises(AttributeError, match=r"no setter|can't set"):
        car.speed = cars.Speed.SLOW
    with pytest.raises(AttributeError, match="has no attribute 'seat'"):
        car.seat = 5
    with pytest.raises(TypeError, match=r"cars\.Car\.seats is int, not str"):
        car.seats = "5"
    with pytest.raises(TypeError, match=r"cars\.Car\.color is Color, not int"):
        car.color = 1


# Objects.


def test_objects_are_of_the_modules_classes_and_stay_the_same(cars: Any, car: Any) -> None:
    engine = car.engine()
    assert isinstance(engine, cars.Engine)
    assert engine.power == 90
    assert car.engine() is engine is car.engines()[0]
    other = car.engines()[1]
    assert car.swap(other) is engine
    assert car.engine() is other
    assert isinstance(behaviour_of(engine), EngineBehaviour)


def test_an_object_goes_with_its_last_reference_and_its_behaviour_hears_of_it(stub: Path) -> None:
    gone: list[str] = []

    class Engine:
        def _released(self) -> None:
            gone.append("engine")

    class Car(CarBehaviour):
        def engine(self) -> Any:
            return self._spare

        _spare = Engine()

    cars: Any = stand_in(stub, "cars", {"Car": Car, "Engine": Engine})
    car = cars.Car(listener_of(cars))
    gc.disable()  # it must go at once, not when cycles are looked for
    try:
        engine = car.engine()
        reference = weakref.ref(engine)
        assert gone == []
        del engine
        assert reference() is None
        assert gone == ["engine"]
    finally:
        gc.enable()


def test_a_class_without_a_constructor_cannot_be_made(cars: Any) -> None:
    with pytest.raises(TypeError, match=r"cars\.Engine: No constructor defined!"):
        cars.Engine()


def test_a_behaviour_knows_the_module(cars: Any, car: Any) -> None:
    assert behaviour_of(car)._module is cars
    assert behaviour_of(car.engine())._module is cars


def test_enums_have_names_and_values_and_are_equal_to_their_own_kind_only(cars: Any) -> None:
    fast = cars.Speed.FAST
    assert (fast.name, fast.value, int(fast), 1 << int(fast)) == ("FAST", 4, 4, 16)
    assert cars.Speed(4) is fast
    assert dict(cars.Speed.__members__) == {"SLOW": cars.Speed.SLOW, "FAST": fast}
    assert fast != 4
    assert fast > cars.Speed.SLOW
    assert cars.Speed.SLOW != cars.Color.RED
    assert cars.IListener.GOOD is cars.IListener.Kind.GOOD is cars.Listener.Kind.GOOD
    with pytest.raises(ValueError, match="3"):
        cars.Speed(3)


def test_an_enum_without_values_is_refused(stub: Path) -> None:
    stub.write_text("class A:\n    X: ClassVar[A]\n    __members__: ClassVar[dict[str, A]]\n")
    with pytest.raises(ValueError, match=r"no value of A\.X"):
        stand_in(stub, "a", {})


def test_shapes_are_made_of_sequences_and_are_like_them(cars: Any, car: Any) -> None:
    car.set_size((2, 3))
    size = car.size()
    assert isinstance(size, cars.Dims)
    assert (tuple(size), len(size), size[1], size == (2, 3), size == [2, 4]) == ((2, 3), 2, 3, True, False)
    car.set_size(size)
    car.set_size(cars.Dims([4]))
    assert tuple(car.size()) == (4,)


def test_buffers_are_buffers_and_no_bytes(cars: Any, car: Any) -> None:
    memory = car.papers(bytearray(b"abc"))
    assert isinstance(memory, cars.Memory)
    assert (bytes(memory), memoryview(memory)[1], memory.nbytes) == (b"abc", ord("b"), 3)
    assert bytes(car.papers(memory)) == b"abc"
    with pytest.raises(TypeError):
        len(memory)
    with pytest.raises(AttributeError, match="hex"):
        memory.hex()


def test_users_classes_get_calls_that_are_checked(cars: Any) -> None:
    listener = listener_of(cars)
    assert cars.Car(listener).drive("home") is True
    assert listener.words == [(cars.IListener.GOOD, "home")]
    with pytest.raises(AssertionError, match="gave int 3"):
        call(listener, "heard", "GOOD", 3)
    with pytest.raises(AssertionError, match="does not take 1 arguments"):
        call(listener, "heard", "GOOD")
    with pytest.raises(AssertionError, match="no class with a method seen"):
        call(listener, "seen")
    listener.heard = lambda kind, words: None
    with pytest.raises(AssertionError, match=r"Listener\.heard gave NoneType None, the stub says bool"):
        call(listener, "heard", "GOOD", "words")


def test_a_users_class_must_call_its_bases_constructor(cars: Any) -> None:
    class Careless(cars.IListener):  # type: ignore[misc]
        def __init__(self) -> None: ...

    with pytest.raises(TypeError, match=r"Careless\.__init__\(\) must be called when overriding __init__"):
        Careless()


def test_types_that_are_not_checked_are_listed(cars: Any, car: Any) -> None:
    assert unknown_annotations(cars) == []
    car.strange("thing")
    assert unknown_annotations(cars) == ["decimal.Decimal"]
