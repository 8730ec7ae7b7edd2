"""Changes of good inputs: JSON by value, then as text, then as bytes; binary files; lines of text.

Nothing is drawn value by value by hypothesis: that takes 20 ms an input, and this 0.2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

# What stands in the place of a value, written as no JSON library would write it.
NASTY = (
    *("1e999", "-1e999", "9" * 5_000, "-" + "9" * 5_000, "0." + "0" * 5_000 + "1", "1E+400", "-0", "NaN", "Infinity"),
    *('"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\\uD83D\\uDE00"', '""', '"\x7f"', '"\\x"', '"a', "'a'", "01"),
    *("null", "true", "[]", "{}", "[[]]", "[null]", '["a", 1]', "[1, [2], [[3]]]", '{"a": {"b": []}}', "[,]", "[1,]"),
    *("[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500, "[" * 500, '{"text": 1}', '{"content": [{"type": "x"}]}'),
)
# What is not UTF-8: a lone byte, an overlong slash, a surrogate, one beyond Unicode, a byte order mark.
BYTES = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xef\xbb\xbf", b"\x00", b"\xe2\x98")

_MARK = "\ufffe"  # where something nasty is to be written
_SCALARS = (None, True, False, 0, 1, -1, 2**31, 2**64, 10**30, 0.5, -1e300, "", "a", "Left", "\U0001f600", _MARK)


def _value(random: Random, depth: int = 3) -> Any:
    kind = random.randrange(4 if depth else 2)
    if kind < 2:
        return random.choice((_MARK, *_SCALARS))
    inner = [_value(random, depth - 1) for _ in range(random.randrange(3))]
    return inner if kind == 2 else {random.choice("abc"): one for one in inner}


def changed(random: Random, seed: Any) -> Any:
    """``seed`` with some value in it replaced, left out or added."""
    if isinstance(seed, dict) and seed and random.random() < 0.8:
        key = random.choice(sorted(seed))
        kind = random.choice(("within", "within", "without", "moved"))
        if kind == "without":
            return {name: value for name, value in seed.items() if name != key}
        other = key if kind == "within" else random.choice([*sorted(seed), "texts", "documents", "x"])
        return {**seed, other: changed(random, seed[key])}
    if isinstance(seed, list) and seed and random.random() < 0.8:
        index = random.randrange(len(seed))
        return [*seed[:index], changed(random, seed[index]), *seed[index + random.randrange(2) :]]
    return _value(random)


def changed_body(random: Random, seeds: Sequence[Any], rough: float = 1.0) -> bytes:
    """A changed one of ``seeds``: as JSON and, of the share ``rough``, as text and as bytes too."""
    is_rough = random.random() < rough
    if is_rough and random.random() < 0.1:
        return random.randbytes(random.randrange(60))
    seed = random.choice(seeds)
    for _ in range(random.randrange(4)):
        seed = changed(random, seed)
    return spoilt(random, seed) if is_rough else json.dumps(seed).encode()


def spoilt(random: Random, value: Any) -> bytes:
    """``value`` as JSON, with something nasty where it is marked, keys that stand twice, and bytes that are none."""
    text = json.dumps(value, ensure_ascii=random.random() < 0.5)
    for written in (f'"{_MARK}"', json.dumps(_MARK)):
        while written in text:
            text = text.replace(written, random.choice(NASTY), 1)
    if isinstance(value, dict) and value and random.random() < 0.3:
        key = json.dumps(random.choice(sorted(value)))
        text = f"{{{key}: {random.choice(NASTY)}, {text[1:]}"  # twice the same key
    body = text.encode("utf-8", "surrogatepass")
    for _ in range(random.choice((0, 0, 1, 2))):
        start = random.randrange(len(body) + 1)
        stop = min(len(body), start + random.randrange(9))
        body = body[:start] + random.choice((b"", *BYTES, random.randbytes(3))) + body[stop:]
    return body


# Of files that are read in many steps: what is no JSON gets no further than the first.
ROUGH = 0.2

# Numbers in binary files: lengths, counts, offsets.
_NUMBERS = (0, 1, 7, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


def changed_bytes(random: Random, seed: bytes, words: Sequence[bytes] = ()) -> bytes:
    """``seed`` with a few places changed: bits, bytes, numbers of any width, ranges left out, repeated or moved, and
    ``words`` that the format knows."""
    content = bytearray(seed)
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        start = random.randrange(len(content) + 1)
        stop = min(len(content), start + random.choice((1, 2, 4, 8, 64, len(content))))
        kind = random.randrange(8)
        if kind == 0 and start < len(content):
            content[start] ^= 1 << random.randrange(8)
        elif kind == 1:
            width = random.choice((1, 2, 4, 8))
            number = random.choice(_NUMBERS) % (1 << 8 * width)
            content[start : start + width] = number.to_bytes(width, random.choice(("little", "big")))
        elif kind == 2:
            del content[start:stop]
        elif kind == 3:
            content[start:start] = content[start:stop] * random.choice((1, 2, 50))
        elif kind == 4:
            content[start:stop] = random.randbytes(stop - start)
        elif kind == 5 and words:
            content[start : start + random.choice((0, 1, 8))] = random.choice(words)
        elif kind == 6:
            del content[start:]
        else:
            content[start:start] = random.choice((*BYTES, b"\n", b"\0" * 9, b"\xff" * 9))
    return bytes(content)


# What a scalar of YAML may be: numbers that are none, dates, texts that look like something else, tags, references.
_SCALARS_OF_YAML = (
    *(
        "",
        "~",
        "yes",
        "1_000",
        "0x10",
        "1e999",
        ".nan",
        "-.inf",
        "1:30",
        "2026-11-25",
        "'a'",
        "[",
        "{",
        "]",
        "- a",
        "|",
    ),
    *(
        "!!python/object:os.system x",
        "!!binary a",
        "!!set {a}",
        "&a [*a]",
        "*b",
        "<<: *a",
        "? [a]",
        "\\x",
        "\t",
        "%YAML 9",
    ),
    *(
        "9" * 5_000,
        "-" * 300,
        "[" * 500,
        "{a: " * 200,
        "2026-99-99",
        "!!timestamp 1",
        "!!int x",
        "!!float x",
        "\x07",
        "é",
    ),
)


def changed_lines(random: Random, seed: str) -> bytes:
    """``seed``, lines of ``name: value``, with some of them changed."""
    lines = seed.split("\n")
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(lines))
        kind = random.randrange(6)
        if kind == 0:
            lines[at] = f"{lines[at].partition(':')[0]}: {random.choice(_SCALARS_OF_YAML)}"
        elif kind == 1:
            lines[at] = f"{random.choice(_SCALARS_OF_YAML)}: {lines[at].partition(':')[2]}"
        elif kind == 2:
            lines.insert(at, random.choice(lines))
        elif kind == 3:
            lines[at] = f"{' ' * random.randrange(5)}{random.choice(('- ', '', '? '))}{lines[at].lstrip()}"
        elif kind == 4 and len(lines) > 1:
            del lines[at]
        else:
            lines[at] = random.choice(_SCALARS_OF_YAML)
    content = "\n".join(lines).encode("utf-8", "surrogatepass")
    return changed_bytes(random, content) if random.random() < 0.2 else content
