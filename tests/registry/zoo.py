"""A module with every kind of target, and what replaces them."""

from __future__ import annotations

ZOO = '''
import enum
import functools
from dataclasses import dataclass
from typing import NamedTuple

NUMBER = 3
TABLE = {"a": 1}


def plain(x, y=2):
    """Plain."""
    return x + y


async def coroutine(x):
    return x


def generator(x):
    yield x
    return x + 1


async def async_generator(x):
    yield x


class Base:
    scale = 5

    def method(self, x):
        return x

    @staticmethod
    def static(x):
        return x

    @classmethod
    def klass(cls, x):
        return cls.__name__, x

    @property
    def prop(self):
        """Prop."""
        return self._p

    @prop.setter
    def prop(self, value):
        self._p = value

    @functools.cached_property
    def cached(self):
        return 7

    def __call__(self, x):
        return x

    def __getstate__(self):
        return {"_p": getattr(self, "_p", None)}


class Sub(Base):
    def method(self, x):
        return ("sub", super().method(x))


class Alone:
    def hello(self):
        return "hello"


class Deaf(functools.partial):
    pass


@functools.lru_cache
def remembered(x):
    return x


@dataclass
class Data:
    field: int = 1


class Colour(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    one: int = 1


def made_by(cls):
    def make(x):
        return cls(x)
    return make
'''

OURS = """
import functools

NUMBER = 30
TABLE = {"a": 10}
TEXT = "3"
FIVE = 50

def wrap1(original):
    def ours(x):
        return ("ours", original(x))
    return ours

def plain(original):
    def plain(x, y=2):
        return ("ours", original(x, y))
    return plain

def coroutine(original):
    async def coroutine(x):
        return ("ours", await original(x))
    return coroutine

def generator(original):
    def generator(x):
        result = yield from original(x)
        return ("ours", result)
    return generator

def async_generator(original):
    async def async_generator(x):
        async for item in original(x):
            yield ("ours", item)
    return async_generator

def method(original):
    def method(self, x):
        return ("ours", original(self, x))
    return method

def klass(original):
    def klass(cls, x):
        return ("ours", original(cls, x))
    return klass

def prop(original):
    def prop(self):
        return ("ours", original(self))
    return prop

def getstate(original):
    def __getstate__(self):
        return original(self) | {"ours": True}
    return __getstate__

def hello(original):
    def hello(self):
        return "ours"
    return hello
"""
