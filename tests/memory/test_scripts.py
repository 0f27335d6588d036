"""Ways to write the same word, in more than 15 scripts: every index finds the same."""

# ruff: noqa: RUF001  the letters of other scripts are meant

import pytest

from agentfsm.memory import PostgresIndex, SQLiteIndex
from agentfsm.testing.memory_conformance import OF_ANN, build_item
from tests.support.database_servers import empty_schema

# What is kept, and how it is searched.
PAIRS = (
    # Latin: accents, composed or not, strokes, ligatures, case, wide and styled letters
    ("un café noir", "cafe"),
    ("a glass of rose\u0301", "ROSÉ"),
    ("Żółta łódka", "zolta lodka"),
    ("Straße nach Köln", "STRASSE"),
    ("Smørrebrød", "smorrebrod"),
    ("Þingvellir", "thingvellir"),
    ("œuvre d'art", "oeuvre"),
    ("İSTANBUL boğazı", "istanbul"),
    ("ılık su", "ilik"),
    ("Điện thoại", "dien thoai"),
    ("the o\ufb03ce \ufb01le", "office"),
    ("\uff34\uff4f\uff4b\uff59\uff4f tower", "tokyo"),
    ("\U0001d400\U0001d401 test", "ab"),
    ("co\u00adoperation", "cooperation"),
    ("zero\u200bwidth", "zerowidth"),
    ("naïve piñata", "pinata"),
    ("she was running", "runs"),
    # Numbers
    ("it cost 10,000 yen", "10000"),
    ("it paid 25'500 francs", "25500"),
    ("es kostete 30.700 Mark", "30,700"),
    ("prix 40\u202f800 francs", "40800"),
    ("1_500_000 rows", "1500000"),
    ("salary 12,34,567 rupees", "1234567"),
    ("\uff11\uff12\uff13\uff14\uff15 rooms", "12345"),
    ("x\u00b2 + y\u00b2", "x2"),
    # Greek
    ("Αθήνα", "αθηνα"),
    ("ο δρόμος", "ΔΡΌΜΟΣ"),
    ("ἄνθρωπος", "ανθρωπος"),
    # Cyrillic
    ("Ёлка горит", "елка"),
    ("МОСКВА", "москва"),
    ("мой чаи\u0306", "чай"),
    ("Київ", "київ"),
    # Hebrew
    ("שָׁלוֹם לכולם", "שלום"),
    ("בַּיִת גדול", "בית"),
    # Arabic, Persian
    ("مُحَمَّد", "محمد"),
    ("الأحد القادم", "الاحد"),
    ("مدرســـة", "مدرسه"),
    ("مستشفى", "مستشفي"),
    ("کتاب فارسی", "كتاب"),
    ("یک دوست", "يك"),
    ("العدد ١٢٣٤٥٦", "123456"),
    ("قیمت ۹۸۷۶", "9876"),
    # Devanagari
    ("मुझे किताबें पसंद हैं", "किताबें"),
    ("हिन्दी सीखना", "हिन्दी"),
    ("ज़मीन बेची", "जमीन"),
    ("क\u093cलम", "\u0958लम"),
    ("कमरा ४२१", "421"),
    # Bengali
    ("আমার বাংলা বই", "বাংলা"),
    ("দাম ৫৬৭", "567"),
    # Gurmukhi, Gujarati
    ("ਪੰਜਾਬੀ ਭਾਸ਼ਾ", "ਪੰਜਾਬੀ"),
    ("ગુજરાતી ભાષા", "ગુજરાતી"),
    # Tamil, Telugu, Kannada, Malayalam
    ("தமிழ் மொழி", "தமிழ்"),
    ("తెలుగు భాష", "తెలుగు"),
    ("ಕನ್ನಡ ನುಡಿ", "ಕನ್ನಡ"),
    ("മലയാളം ഭാഷ", "മലയാളം"),
    # Thai
    ("ฉันอยู่ที่กรุงเทพมหานคร", "กรุงเทพ"),
    ("ราคา ๓๕๐ บาท", "350"),
    # Georgian, Armenian, Ethiopic
    ("ᲗᲑᲘᲚᲘᲡᲘ ქალაქი", "თბილისი"),
    ("ՀԱՅԱՍՏԱՆ երկիր", "հայաստան"),
    ("አዲስ አበባ", "አበባ"),
    # Chinese
    ("我明年想去北京旅游", "北京"),
    ("\uf9fa\u614b \u2f00\u4e2a", "一个"),
    # Japanese
    ("ｶﾞｲﾄﾞ ブック", "ガイド"),
    ("か\u3099くせい", "がくせい"),
    ("東京都に住む", "東京"),
    # Korean
    ("\u1112\u1161\u11ab\u1100\u1173\u11af 공부", "한글"),
    ("서울에 산다", "서울"),
)


@pytest.fixture(params=["sqlite", "postgres"])
async def index(request, tmp_path):
    if request.param == "sqlite":
        index = SQLiteIndex(tmp_path / "memory.db")
        yield index
        await index.aclose()
    else:
        with empty_schema(request.getfixturevalue("postgres_desk")) as schema:
            index = PostgresIndex(request.getfixturevalue("shared_postgres"), schema=schema)
            yield index
            await index.aclose()


async def test_each_pair_is_found(index):
    """All ways to write a word find it, in every index, and find nothing else."""
    assert len(PAIRS) == 67
    await index.add([build_item(f"{number:02}", text) for number, (text, _) in enumerate(PAIRS)])
    missed = {}
    for number, (text, query) in enumerate(PAIRS):
        found = [match.item_id for match in (await index.search_text(query, OF_ANN, 10)).matches]
        if found != [f"{number:02}"]:
            missed[text, query] = found
    assert not missed


async def test_a_misspelled_word_is_found(index):
    """A word that no item has counts as the words like it; one that is known is not changed."""
    await index.add(
        [
            build_item("coffee", "Ann likes coffee"),
            build_item("restaurant", "a restaurant in Lisbon"),
            build_item("form", "she filled in a form"),
            build_item("from", "she came from Porto"),
        ]
    )

    async def search(query):
        return [match.item_id for match in (await index.search_text(query, OF_ANN, 10)).matches]

    for query, found in {
        "cofee": "coffee",
        "restuarant": "restaurant",
        "Lisbonn": "restaurant",
        "form": "form",
    }.items():
        assert await search(query) == [found], query
    assert await search("zzzz") == []
