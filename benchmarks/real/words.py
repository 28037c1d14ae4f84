"""The things of the real world: their English names, what they are called else, what they are, and how they are drawn."""

from collections.abc import Mapping
from typing import Final

# By what they are, most narrow first: names, each with the name of its drawing in the package `emoji` where it differs.
_THINGS: Final[Mapping[tuple[str, ...], str]] = {
    ("animal",): """dog cat horse cow pig rabbit bear tiger lion monkey elephant giraffe zebra kangaroo camel mouse
    fox wolf panda frog crocodile turtle snake snail""",
    ("bird", "animal"): "chicken penguin eagle duck owl parrot ",
    ("sea animal", "animal"): "whale dolphin fish shark octopus crab",
    ("insect", "animal"): "butterfly bee=honeybee ant mosquito",
    ("fruit", "food"): """apple=red_apple banana grapes watermelon lemon orange=tangerine pineapple mango peach cherries
    strawberry coconut avocado""",
    ("vegetable", "food"): "tomato eggplant potato carrot corn=ear_of_corn broccoli mushroom onion",
    ("sweet", "food"): "cookie cake=shortcake chocolate=chocolate_bar candy ",
    ("food",): """bread pancakes cheese=cheese_wedge pizza sandwich egg
    popcorn sushi""",
    ("road vehicle", "vehicle"): """car=automobile taxi bus truck=delivery_truck tractor bicycle motorcycle
    ambulance""",
    ("rail vehicle", "vehicle"): "train=locomotive tram=tram_car",
    ("aircraft", "vehicle"): "airplane helicopter rocket",
    ("boat", "vehicle"): "ship canoe",
    ("plant",): "tree=deciduous_tree cactus rose sunflower ",
    ("building",): "house castle church tent",
    ("musical instrument",): "guitar trumpet violin drum piano=musical_keyboard ",
    ("tool",): "hammer axe saw=carpentry_saw scissors shovel broom bucket magnet ladder",
    ("clothing",): "hat=top_hat glasses shoe=running_shoe shirt=t-shirt dress jeans gloves socks crown",
    ("furniture",): "chair bed door bathtub toilet",
    ("ball",): "soccer=soccer_ball basketball baseball tennis",
    ("weather",): "sun moon=crescent_moon star cloud tornado",
    ("device",): """camera telephone radio television laptop watch clock=alarm_clock microscope telescope flashlight
    battery""",
    (): """book=open_book newspaper key umbrella balloon ring candle bell basket trophy kite bomb gift=wrapped_gift
    fire ghost robot skull backpack envelope""",
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
    **{"rabbit": "rabbit_face", "tiger": "tiger_face", "monkey": "monkey_face", "mouse": "mouse_face"},
    **{"whale": "spouting_whale", "fish": "tropical_fish", "chicken": "rooster", "apple": "green_apple"},
    **{"cake": "birthday_cake", "car": "sport_utility_vehicle", "taxi": "oncoming_taxi", "bus": "oncoming_bus"},
    **{"truck": "articulated_lorry", "train": "high-speed_train", "ship": "passenger_ship", "tree": "evergreen_tree"},
    **{"house": "house_with_garden", "shoe": "hiking_boot", "hat": "woman’s_hat", "book": "closed_book"},
    **{"key": "old_key", "umbrella": "closed_umbrella", "moon": "full_moon", "star": "glowing_star"},
    **{"camera": "video_camera", "airplane": "small_airplane"},
}
OTHER_THINGS, OTHER_KINDS = _read(
    {
        ("animal",): "goat deer gorilla hamster koala hippopotamus rhinoceros squirrel=chipmunk leopard hedgehog",
        ("bird", "animal"): "turkey dove goose flamingo peacock swan",
        ("sea animal", "animal"): "squid lobster shrimp",
        ("insect", "animal"): "beetle cricket",
        ("fruit", "food"): "pear melon kiwi=kiwi_fruit blueberries",
        ("vegetable", "food"): "cucumber garlic",
        ("sweet", "food"): "custard doughnut lollipop cupcake",
        ("food",): "waffle bagel croissant pretzel hamburger taco burrito spaghetti",
        ("road vehicle", "vehicle"): "van=minibus scooter=kick_scooter",
        ("aircraft", "vehicle"): "parachute",
        ("boat", "vehicle"): "ferry speedboat sailboat",
        ("plant",): "hibiscus seedling tulip",
        ("building",): "hospital mosque",
        ("musical instrument",): "saxophone banjo harp flute accordion",
        ("tool",): "wrench screwdriver",
        ("clothing",): "coat kimono scarf",
    }
)
