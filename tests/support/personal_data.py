"""Texts with personal data and secrets, and texts that only look like it, in Chinese and English.

All are invented. Their check digits are right; numbers of cards are numbers for tests that are published.
"""
# ruff: noqa: RUF001  Chinese has its own punctuation, and digits of full width

# Texts by the kind of the one thing in them.
WITH_DATA = {
    "email": (
        "邮箱ann.lee@example.com请回复",
        "请联系张三（zhang_san@mail.example.cn）。",
        "Write to <Ann.Lee+news@sub.example.co.uk>, please.",
        "mailto:bob@example.org",
        "email=bob%tag@example.io;",
        "发至a1@b2.cn谢谢",
        "全角ann＠example．com也算",
    ),
    "phone": (
        "手机13800138000",
        "电话：138 0013 8000，请在工作时间拨打",
        "打138-0013-8000找王先生",
        "+86 13912345678 is my number",
        "+8618612345678",
        "0086-15912345678",
        "全角１３８００１３８０００号码",
        "联系19912345678吧",
        "8613800138000请存",
        "tel:17712345678;ext=1",
        "隐藏字符1380\u200b0138\u200b000号",
        "Call 18888888888.",
    ),
    "id_card": (
        "身份证11010519491231002X号",
        "身份证号：440524188001010014。",
        "id 11010519491231002x, issued in Beijing",
        "证件号110105 19491231 002X",
        "他的号码是330106199003071236。",
        "320102200002290013的人",
        "ID:510107199912012348,male",
    ),
    "bank_card": (
        "卡号6222021234567890128请核对",
        "银行卡6228480402564890018",
        "4111 1111 1111 1111",
        "pay with 5555-5555-5555-4444 now",
        "AmEx 3782 822463 10005",
        "尾号见6011000990139424。",
        "UnionPay 6212 3456 7890 1235 343",
        "2223003122003222",
        "工行9558801234567890128",
        "卡4111111111111111有效期12/27",
    ),
    "iban": (
        "DE89 3704 0044 0532 0130 00",
        "账户GB82WEST12345698765432。",
        "IBAN: FR1420041010050500013M02606",
        "to NL91ABNA0417164300 today",
        "CH93-0076-2011-6238-5295-7",
        "no9386011117947",
    ),
    "secret": (
        "密码是abc12345678",
        "key sk-proj-aB3dE5fG7hJ9kL1m in use",
        "AKIAIOSFODNN7EXAMPLE",
        "令牌ghp_16C7e42F292c6912E7710c838347Ae178B4a泄露",
        "Authorization: Bearer 7f3a9c2e1b04d5e6f7a8",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N",
        "postgres://app:s3cr3tpw@localhost/shop",
        "api_key = 'q8W3e5R7t9'",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----",
        "口令：t0kenvalue99",
        "LTAI4FzExample1234567890",
        "xoxb-1234567890-abcdefghij",
    ),
}

# Texts with data that are not found: there is no form to find them by.
MISSED = {
    "email": ("ann.lee (at) example dot com", "张三@例子.中国"),
    "phone": ("电话一三八零零一三八零零零", "call 138.0013.8000", "Tel. +1 415 555 2671"),
    "id_card": ("护照E12345678", "身份证11010519491231 002X"),
    "bank_card": ("卡号 62220 21234 56789 0128",),
    "iban": ("account 532013000 at bank 37040044",),
    "secret": ("the password is correct horse battery staple", "密码：一二三四五六七八"),
}

# Texts without data.
WITHOUT_DATA = (
    "订单号20240101123456789已发货",
    "身份证110105194912310021无效",  # its check character is wrong
    "编号4111111111111112",
    "时间戳1700000000000毫秒",
    "版本1.38001380001",
    "共13800件，单价99.80元",
    "快递单号SF1380013800012",
    "IP 192.168.100.200，端口13800",
    "比例0.13800138000",
    "圆周率3.14159265358979323846",
    "统一社会信用代码91110000600037341L",
    "公式 a@b 表示矩阵乘法",
    "图标icon@2x.png",
    "银行卡号码有16到19位数字",
    "手机号以1开头，共11位",
    "密码必须至少八个字符",
    "群号123456789，楼号5单元1302",
    "git clone git@github.com:example/shop.git",
    "npm install react@18.2.0 lodash@4.17.21",
    "commit 3f2c1380013800ab99de",
    "uuid 123e4567-e89b-12d3-a456-426614174000",
    "The number 1234567890123456 is not a card.",
    "snowflake 1541815603606036480",
    "DE00 3704 0044 0532 0130 00",
    "GB29 is a road in Kent",
    "Set the password in settings; the token expires soon.",
    "token: required",
    "passwords: see section 4",
    "bearer of good news and other certificates",
    "sk-learn and sk-image are libraries",
    "https://example.com/a:b/c",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "eyJ is how a JWT begins",
    "ISBN 978-3-16-148410-0",
    "Call extension 13800 or room 1380.",
    "2024-01-15 13:45:30.123456789",
    "pages 13-19, 4-4-4-4",
    "bits 1111111111111",
    "The secret to good bread is time.",
    "price 13,800,138,000 USD",
)

# Texts without data in which something is found: a number in the form of a phone number, with a valid check digit by
# chance, or an example of an address.
MISTAKEN = (
    ("phone", "订单号13800138000"),
    ("bank_card", "流水号4000000000000002"),
    ("email", "the form is name@host.tld"),
)
