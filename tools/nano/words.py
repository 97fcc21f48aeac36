"""The words of the generated corpus and the rule that holds some of them out.

A word is either one of the common English words below or a pronounceable invention.
Whether a key (a word, a pair of numbers) is held out depends on the key alone, so train
and held-out data are disjoint whatever the seed, the task or the phrasing.
"""

import random
import zlib

from tinsmith.base_models.nano import Split

HELDOUT_ONE_IN = 8

_ENGLISH_TEXT = """
able acid acorn actor address adult advice afraid agent airport album alive almond amber anchor
angel angle animal ankle answer apple april apron arena armor army arrow artist atlas atom aunt
author autumn avenue award bacon badge bagel baker balance balloon bamboo banana band bandit
banker banner barber bargain barn barrel basket battle beach beacon bean bear beard beauty
beaver bed bell belt bench berry bicycle bird biscuit black blade blanket blaze blind block
blossom blue board boat bonus book border bottle bottom bowl box brain branch brave bread
break breakfast breeze brick bridge bright broad broken bronze brother brown brush bubble
bucket budget bug builder bull bundle burger bus bush butter button cabbage cabin cable cactus
cage cake camel camera camp canal candle candy canoe canyon captain carbon card carpet carrot
cart castle cat cattle cave ceiling cellar cement center chain chair chalk chapter cheese
cherry chess chest chicken child chimney circle city clay clean clear clerk clever client cliff
climb clock cloth cloud clover coach coast coat code coffee coin cold color comet copper coral
corn cotton couch country cousin cow crab cradle craft crane crayon cream credit cricket crown
crystal cup curtain cushion dairy daisy dance danger daughter dawn deal deer delta desert desk
dinner doctor dog dolphin donkey donut door dragon dream dress drink driver drum duck dust eager
eagle early earth easy echo edge effort egg eight elbow elder electric elephant elm emerald
empire empty energy engine equal evening event exact exit expert fabric face factor fair falcon
family farm farmer father feather fence fern festival field fig final finger fire fish flag
flame flat flower flute fog folder forest fork fort fountain fox frame free fresh friend frog
frost fruit funny future galaxy garden garlic gate gentle ghost giant ginger giraffe glass globe
glove goat gold golden goose grain grand grape grass gravel gravy green grey grid guard guest
guitar gulf hammer hand happy harbor harvest hat hawk hazel heart heavy helmet herb hero hill
hobby holiday honey hook horse hotel house humor hungry hunter ice icon idea idle image impact
inch index ink insect iron island item ivory ivy jacket jam jar jelly jewel job join joke
journal journey judge juice jungle junior kettle key kitchen kite kitten knee knife knight lace
ladder lake lamp land lantern large laser laugh lava lawn lazy leader leaf lemon lesson letter
level library light lily lime linen lion lizard local lodge logic lucky lumber lunch machine
magic magnet mango maple marble march market mask master meadow medal melon memory metal middle
milk mill mineral mint mirror model monkey month moon morning moss mother motor mountain mouse
movie museum music mustard napkin narrow nature neck needle nephew nest night noble noise noodle
north notebook novel number nurse oak oasis ocean office olive omega onion open opera orange
orbit orchard order organ otter oval oven owl oyster paddle page paint palace palm panda panel
paper parade parent park parrot party pasta patch path peach peanut pearl pebble pencil penguin
pepper phone photo physics piano pickle picnic pigeon pillow pilot pine pink pirate pizza planet
plant plastic plate plum pocket poem polar police pond pony popcorn potato powder present prince
prize pumpkin puppet purple puzzle quantum quartz queen quick quiet quill quilt rabbit radio
raft railway rain rainbow ranch rapid raven ready red reef ribbon rice rider river road robin
robot rock rocket roof room rose round royal rubber ruby sack saddle sailor salad salmon salt
sand sandal school science scout sea season secret seed senior seven shadow shark sheep shelf
shell sheriff shield ship shirt shoe shop short shovel sign silent silk silver simple sister
sketch sleep slow small smart smoke smooth snail snake snow soap socks soft soldier solid song
soup south space spark sparrow spice spider spirit split spoon sport spring square squirrel
stable stage star station statue steam steel stone storm story street string strong student
sugar summer sun sunset swan sweet swift table tailor talent teacher temple tennis thread throne
thunder ticket tiger timber toast token tomato tooth tower town toy track trade traffic train
travel tree triangle truck trumpet tulip tunnel turkey turtle twelve twin ugly umbrella uncle
under unit upper urban useful valley value vanilla velvet verse village violet violin visitor
voice volcano voyage wagon walnut warm water wealth weather west whale wheat wheel whisper white
wide wild willow window winter wise wizard wolf wonder wood wool writer yellow young zebra zero
"""
ENGLISH = tuple(_ENGLISH_TEXT.split())

_ONSET_TEXT = "b c d f g h j k l m n p r s t v w z bl br ch cl dr fl gr pl sh sl st tr"
_VOWEL_TEXT = "a e i o u a e i o u ai ea ee oo ou"
_CODA_TEXT = "n r l t s m d p ck nd st rt ng"
_ONSETS = tuple(_ONSET_TEXT.split())
_VOWELS = tuple(_VOWEL_TEXT.split())
_CODAS = ("", "", "", "", *_CODA_TEXT.split())
_INVENTED_SHARE = 0.5


def is_heldout(key: str) -> bool:
    return zlib.crc32(key.encode()) % HELDOUT_ONE_IN == 0


def in_split(key: str, split: Split) -> bool:
    return is_heldout(key) == (split == "heldout")


def invent(rng: random.Random) -> str:
    """A pronounceable word of one to three syllables, 2 to 9 letters."""
    while True:
        syllables = [
            rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(rng.choice((1, 2, 2, 3)))
        ]
        if rng.random() < 0.15:
            syllables[0] = syllables[0].lstrip("bcdfghjklmnpqrstvwxyz")
        word = "".join(syllables)
        if 2 <= len(word) <= 9:
            return word


def draw_word(rng: random.Random, split: Split) -> str:
    while True:
        word = invent(rng) if rng.random() < _INVENTED_SHARE else rng.choice(ENGLISH)
        if in_split(word, split):
            return word
