"""The things of the real world: their English names, what they are, and how they are drawn."""

from collections.abc import Mapping
from typing import Final

# By what they are, most narrow first: names, each with the name of its drawing in the package `emoji` where it differs.
_THINGS: Final[Mapping[tuple[str, ...], str]] = {
    ("animal",): "dog cat horse cow pig rabbit lion elephant giraffe zebra frog turtle",
    ("bird", "animal"): "penguin eagle duck owl",
    ("sea animal", "animal"): "fish shark octopus",
    ("insect", "animal"): "butterfly bee=honeybee ant",
    ("fruit", "food"): "apple=red_apple banana grapes lemon pineapple strawberry",
    ("vegetable", "food"): "tomato carrot corn=ear_of_corn mushroom",
    ("food",): "bread pizza egg cheese=cheese_wedge",
    ("vehicle",): "car=automobile bus truck=delivery_truck bicycle train=locomotive airplane ship",
    ("plant",): "tree=deciduous_tree cactus rose",
    ("building",): "house castle",
    ("musical instrument",): "guitar trumpet drum",
    ("tool",): "hammer axe scissors",
    ("clothing",): "hat=top_hat shoe=running_shoe dress",
    ("furniture",): "chair bed",
    (): "book=open_book key umbrella clock=alarm_clock camera telephone",
}


def _read(things: Mapping[tuple[str, ...], str]) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    drawings, kinds = {}, {}
    for kind, names in things.items():
        for entry in names.split():
            name, _, drawing = entry.partition("=")
            drawings[name], kinds[name] = drawing or name, kind
    return drawings, kinds


DRAWINGS, KINDS = _read(_THINGS)
NAMES: Final[tuple[str, ...]] = tuple(DRAWINGS)

# Other drawings of the same names and other things of the same kinds: never trained.
OTHER_DRAWINGS: Final[Mapping[str, str]] = {
    **{"dog": "dog_face", "cat": "cat_face", "horse": "horse_face", "cow": "cow_face", "pig": "pig_face"},
    **{"rabbit": "rabbit_face", "fish": "tropical_fish", "apple": "green_apple", "car": "sport_utility_vehicle"},
    **{"bus": "oncoming_bus", "truck": "articulated_lorry", "train": "high-speed_train", "ship": "passenger_ship"},
    **{"tree": "evergreen_tree", "house": "house_with_garden", "shoe": "hiking_boot", "hat": "woman’s_hat"},
    **{"book": "closed_book", "key": "old_key", "umbrella": "closed_umbrella", "camera": "video_camera"},
    **{"airplane": "small_airplane"},
}
OTHER_THINGS, OTHER_KINDS = _read(
    {
        ("animal",): "goat deer gorilla hamster koala squirrel=chipmunk",
        ("bird", "animal"): "turkey dove swan",
        ("insect", "animal"): "beetle cricket",
        ("fruit", "food"): "pear melon",
        ("vegetable", "food"): "cucumber garlic",
        ("food",): "waffle bagel pretzel taco",
        ("vehicle",): "van=minibus scooter=kick_scooter ferry",
        ("musical instrument",): "banjo harp flute",
        ("tool",): "wrench",
        ("clothing",): "coat scarf",
    }
)

# What the films themselves show, by their names in `fetch`: that it is not there would be wrong.
_BUNNY = frozenset({"rabbit", "butterfly", "tree", "animal", "bird", "insect", "plant", "a living creature"})
FOOTAGE: Final[Mapping[str, frozenset[str]]] = {
    "trailer": _BUNNY,
    "bunny": _BUNNY,
    "carphone": frozenset({"car", "vehicle", "clothing", "a living creature"}),
    "bikes": frozenset(
        {"car", "bus", "truck", "bicycle", "house", "tree", "shoe", "vehicle", "building", "plant", "clothing"}
        | {"a living creature"}
    ),
    "photographs": frozenset({"lion", "cat", "animal", "a living creature", "tree", "plant", "building"}),
}
