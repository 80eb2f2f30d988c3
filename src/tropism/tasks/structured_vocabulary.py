"""What structured-output prompts are about: themes of entities and fields, disjoint by split.

A field name, an entity or an enum value belongs to one split only, so that a pass rate on held-out
prompts cannot come from remembering names. Names may recur within a split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tropism.tasks.base import Split
from tropism.tasks.structured_schema import Field


@dataclass(frozen=True)
class Theme:
    """Things of one kind, and the fields that describe any of them.

    Args:
        entities: Nouns that take the article "a" or "an".
        strings: String fields; every prompt has at least one of them.
        others: Integer, number and boolean fields.
        rich: Enum, array and object fields, for higher tiers.
    """

    entities: tuple[str, ...]
    strings: tuple[Field, ...]
    others: tuple[Field, ...]
    rich: tuple[Field, ...]


def _theme(*notation: str) -> Theme:
    """One theme from its entities, string, integer, number, boolean and rich fields.

    Words are separated by spaces, ``_`` stands for a space in an entity. An integer is
    ``name:low:high``; the rich fields are ``name=option|option``, ``name[]`` (array of strings)
    and ``name{string,integer:low:high}``.
    """
    entities, strings, integers, numbers, booleans, rich = notation
    return Theme(
        entities=tuple(word.replace("_", " ") for word in entities.split()),
        strings=tuple(Field(word, "string") for word in strings.split()),
        others=(
            *(_integer(word) for word in integers.split()),
            *(Field(word, "number") for word in numbers.split()),
            *(Field(word, "boolean") for word in booleans.split()),
        ),
        rich=tuple(_rich(word) for word in rich.split()),
    )


def _integer(notation: str) -> Field:
    name, low, high = notation.split(":")
    return Field(name, "integer", minimum=int(low), maximum=int(high))


def _rich(notation: str) -> Field:
    if "=" in notation:
        name, options = notation.split("=")
        return Field(name, "enum", options=tuple(options.split("|")))
    if notation.endswith("[]"):
        return Field(notation.removesuffix("[]"), "array", items=Field("item", "string"))
    name, children = notation.removesuffix("}").split("{")
    string, integer = children.split(",")
    return Field(name, "object", fields=(Field(string, "string"), _integer(integer)))


THEMES: Mapping[Split, Sequence[Theme]] = {
    "train": (
        _theme(
            "book novel atlas cookbook comic",
            "title author publisher language",
            "page_count:20:900 year:1800:2030 chapter_count:3:60",
            "price rating",
            "in_print illustrated",
            "binding=paperback|hardcover|spiral topics[] shelf{label,row:1:40}",
        ),
        _theme(
            "recipe soup cake salad sandwich",
            "dish cuisine chef garnish",
            "serves:1:12 cooking_minutes:5:240 calorie_count:50:1500",
            "salt_grams cost",
            "vegetarian spicy",
            "course=starter|main|dessert ingredients[] oven{mode,temperature:80:250}",
        ),
        _theme(
            "car van truck scooter tractor",
            "brand model color owner",
            "seat_count:1:9 door_count:0:5 mileage:0:300000",
            "weight_tons engine_liters",
            "electric insured",
            "fuel=petrol|diesel|hybrid features[] license{plate,expires:2025:2040}",
        ),
        _theme(
            "dog cat horse parrot rabbit",
            "name breed habitat favorite_food",
            "age:0:40 leg_count:2:4 litter_size:1:12",
            "weight_kg height_m",
            "tame vaccinated",
            "size=small|medium|large tricks[] vet{clinic,visits:0:30}",
        ),
        _theme(
            "city village island harbor region",
            "country mayor river nickname",
            "population:100:9000000 founded:500:2020 district_count:1:40",
            "area_km2 elevation",
            "coastal capital",
            "climate=tropical|temperate|polar landmarks[] airport{code,runways:1:6}",
        ),
        _theme(
            "nurse baker pilot teacher plumber",
            "first_name employer hometown hobby",
            "salary:20000:150000 experience_years:0:45 child_count:0:6",
            "shift_hours commute_km",
            "full_time licensed",
            "contract=permanent|temporary|freelance skills[] manager{surname,extension:10:999}",
        ),
        _theme(
            "song album opera concert band",
            "artist genre record_company venue",
            "track_number:1:30 listener_count:10:90000 member_count:1:80",
            "tempo_bpm length_minutes",
            "live sold_out",
            "mood=happy|sad|calm instruments[] award{prize,won_in:1950:2030}",
        ),
        _theme(
            "laptop phone printer camera router",
            "vendor processor operating_system serial",
            "memory_gb:1:256 port_count:1:12 warranty_months:6:60",
            "screen_inches battery_hours",
            "wireless refurbished",
            "condition=new|used|broken accessories[] support{hotline,tickets:0:500}",
        ),
    ),
    "validation": (
        _theme(
            "match tournament marathon regatta race",
            "winner stadium coach referee",
            "goal_total:0:12 spectator_total:10:90000 round_number:1:20",
            "distance_km ticket_price",
            "televised friendly",
            "surface=grass|clay|sand sponsors[] trophy{metal,grams:100:9000}",
        ),
        _theme(
            "castle tower museum cottage lighthouse",
            "architect street style keeper",
            "floor_total:1:60 window_total:1:400 built_in:1200:2020",
            "height_meters roof_slope",
            "haunted open_to_visitors",
            "material=stone|brick|timber rooms[] garden{hedge,benches:0:30}",
        ),
        _theme(
            "shrub cactus fern orchid vegetable",
            "species origin gardener soil",
            "petal_total:3:40 seed_total:1:500 days_to_bloom:10:200",
            "stem_cm water_liters",
            "edible evergreen",
            "light=shade|partial|direct pests[] pot{glaze,diameter:5:80}",
        ),
        _theme(
            "hotel cruise hike safari flight",
            "destination guide departure_city meal",
            "night_total:1:21 seat_number:1:4000 stop_total:0:12",
            "fare luggage_kg",
            "refundable breakfast_included",
            "class=economy|business|luxury excursions[] cabin{deck,beds:1:4}",
        ),
        _theme(
            "lecture workshop seminar exam thesis",
            "subject professor campus textbook",
            "student_total:3:400 credit_total:1:12 week_number:1:30",
            "average_grade fee",
            "online mandatory",
            "level=beginner|intermediate|advanced modules[] lab{building,desks:4:60}",
        ),
    ),
    "test": (
        _theme(
            "planet comet moon star rocket",
            "constellation discoverer mission neighbor",
            "num_craters:0:5000 orbit_days:1:90000 crew_size:1:8",
            "mass gravity",
            "habitable visible",
            "phase=waxing|waning|eclipsed gases[] probe{agency,launched:1957:2030}",
        ),
        _theme(
            "invoice parcel order receipt coupon",
            "customer product courier warehouse",
            "quantity:1:99 order_number:1000:9999 num_left:0:500",
            "total tax_rate",
            "paid gift",
            "priority=low|normal|urgent remarks[] address{town,zip:10000:99999}",
        ),
        _theme(
            "movie cartoon documentary musical series",
            "director lead_actor studio plot",
            "num_episodes:1:200 num_scenes:5:300 num_awards:0:20",
            "budget_millions score",
            "animated subtitled",
            "audience=kids|teens|adults cast[] premiere{theater,seats_sold:50:3000}",
        ),
        _theme(
            "storm heatwave blizzard hurricane drought",
            "area cause forecaster warning",
            "num_injured:0:300 duration_hours:1:500 num_homes_damaged:0:9000",
            "wind_speed rainfall",
            "predicted ended",
            "severity=mild|moderate|severe shelters[] station{operator,sensors:1:90}",
        ),
        _theme(
            "puzzle doll kite yo-yo teddy_bear",
            "manufacturer character packaging fabric",
            "num_pieces:1:5000 num_players:1:8 minimum_age:1:14",
            "thickness retail_price",
            "washable collectible",
            "shape=round|square|oval add_ons[] box{sticker,barcode:100:999}",
        ),
    ),
}

# fmt: off
INVENTED_STRINGS: Sequence[str] = (
    "Ada Holm", "Bruno Vance", "Cora Lindqvist", "Dario Pell", "Edda Marsh", "Felix Okoro",
    "Greta Soll", "Hugo Tamm", "Ilsa Duarte", "Jonas Reyk", "Kaja Brandt", "Luca Ferro",
    "Mira Osei", "Nils Harrow", "Orla Kinsella", "Pavel Dusek", "Quinn Abara", "Rosa Meller",
    "Silas Thorne", "Tove Ekman",
)
# fmt: on
"""What gold answers put into free strings: names that no prompt contains."""
