"""Names and other values that made-up sentences are filled with."""

from __future__ import annotations


def _list(text: str, separator: str = " ") -> tuple[str, ...]:
    return tuple(text.split(separator))


PEOPLE = _list(
    "Anna Ben Clara David Emma Felix Grace Henry Ida James Karin Leo Maria Noah Olivia Paul Rosa Samuel Tara "
    "Victor Wendy Alice Bruno Carmen Daniel Elena Frank Greta Hugo Irene Jonas Kate Lucas Mona Nina Oscar Petra "
    "Quentin Ruth Simon Theo Ursula Vera Walter Yusuf Zoe Amir Bianca Chen Diego Fatima Hana Ivan Julia Kenji "
    "Layla Mateo Priya Sofia Tom",
)
SURNAMES = _list(
    "Smith Brown Miller Walker Green Baker Cook Fisher Young King Wright Scott Hill Adams Clark Lewis Turner "
    "Parker Evans Garcia Rossi Weber Novak Silva Tanaka Kumar Haddad Larsen Dubois Kowalski Moreno Meyer Jensen "
    "Costa",
)
CITIES = _list(
    "Paris Rome Berlin Madrid London Vienna Prague Lisbon Dublin Oslo Athens Warsaw Cairo Tokyo Delhi Lima Boston "
    "Chicago Seattle Toronto Sydney Nairobi Seoul Munich Hamburg Milan Naples Geneva Zurich Helsinki Budapest "
    "Istanbul Jerusalem Damascus Bombay Shanghai Kyoto Havana Denver Dallas Miami Montreal Brussels Amsterdam "
    "Copenhagen Stockholm Moscow Edinburgh Bristol Oxford York Bath Lyon Venice Florence Seville Krakow",
)
JOBS = _list(
    "teacher,doctor,baker,engineer,painter,lawyer,farmer,nurse,writer,pilot,carpenter,musician,chemist,gardener,"
    "sailor,judge,clerk,cook,librarian,programmer",
    ",",
)
ANIMALS = _list("dog cat horse rabbit parrot goat pony hamster turtle goose")
PETS = _list("Rex Bella Max Luna Rocky Daisy Milo Ruby Toby Coco Simba Lily Oscar Pepper Shadow")
COLOURS = _list("red blue green yellow black white brown grey purple orange pink")
GOODS = _list(
    "apples,pencils,chairs,lamps,books,bottles of wine,candles,shirts,notebooks,cups,clocks,bags of rice,oranges,"
    "umbrellas,hammers,keyboards,plates,knives,blankets,tickets",
    ",",
)
FRUITS = _list("apples pears plums grapes figs lemons oranges cherries peaches melons bananas dates")
DAYS = _list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _list("January February March April May June July August September October November December")
EVENTS = _list("meeting,concert,lecture,wedding,dinner,workshop,match,exhibition,party,interview,lesson", ",")
WEATHER = _list("sunny cloudy rainy snowy windy foggy stormy clear")
CURRENCIES = _list("euros dollars pounds francs yen crowns")
TOPICS = _list(
    "the history of printing,how bread is made,the moons of Jupiter,the rules of chess,the life of bees,"
    "the fall of Rome,how clocks work,the tides,the invention of paper,the migration of birds,"
    "the theory of numbers,garden roses,sorting algorithms,the Python language,old maps,steam engines,sea shells,"
    "the price of wheat,Jane Austen,the Nile",
    ",",
)
MESSAGES = _list(
    "I will be late.;Dinner is ready.;The train is delayed.;Happy birthday!;Please call me.;See you tomorrow.;"
    "The meeting is moved.;I have arrived.;Bring the books.;Thank you for the letter.",
    ";",
)
SONGS = _list(
    "Greensleeves,Yesterday,Moonlight Sonata,Clair de lune,Ave Maria,Danny Boy,The Four Seasons,Auld Lang Syne",
    ",",
)
TASKS = _list(
    "buy milk,water the plants,call the bank,pay the rent,write a letter,fix the door,feed the cat,clean the desk",
    ",",
)
