"""The Chinese text of the built-in set `tiny_zh`: topics, questions and the sentences that answers are made of.

Tables of the same shape as those of `toy_en.py`, written in Chinese rather than translated.
"""

SPACE = ""  # Chinese puts none between words, nor between sentences
SENTENCE_ENDS = "。！？"
WORD_EDGE = ""
SPLIT_SALT = "tiny-zh-1511"  # one that gives all kinds about the same share of unseen pairs

# The whole topic is what the rubric looks for; it occurs in no template and in no other topic.
TOPICS = {
    "food": ("炒饭", "面条", "豆腐", "鱼汤", "饺子", "茄子", "鸡翅", "排骨", "馄饨"),
    "animals": ("鹦鹉", "小猫", "小狗", "兔子", "乌龟", "仓鼠", "山羊", "鸽子", "刺猬"),
    "places": ("海边", "沙漠", "雨林", "小岛", "古城", "植物园", "草原", "瀑布"),
    "hobbies": ("围棋", "书法", "吉他", "游泳", "唱歌", "摄影", "剪纸", "钓鱼"),
}
QUESTIONS = {
    "food": (
        "怎么做{topic}？",
        "怎样把{topic}做得更好吃？",
        "做{topic}有什么窍门吗？",
        "今晚客人想吃{topic}，我该怎么办？",
    ),
    "animals": (
        "怎么照顾{topic}？",
        "养{topic}需要准备什么？",
        "你觉得{topic}好养吗？",
        "家里刚来了一只{topic}，要注意什么？",
    ),
    "places": (
        "去{topic}能看到什么？",
        "什么时候去{topic}最好？",
        "周末去{topic}玩合适吗？",
        "我们要去{topic}，该带些什么？",
    ),
    "hobbies": (
        "怎么开始学{topic}？",
        "学{topic}要准备什么？",
        "听说{topic}很难学，是真的吗？",
        "我想把{topic}学得更好，有什么办法？",
    ),
}
# Any useful body of a kind fits any question of that kind.
USEFUL = {
    "food": (
        "做{topic}要选新鲜的材料。",
        "等{topic}快好了，再放盐和葱花。",
        "做{topic}要看好火候，不能着急。",
        "出锅以前，先尝尝{topic}的咸淡。",
    ),
    "animals": (
        "给{topic}准备干净的水和暖和的窝。",
        "要让{topic}多晒太阳，好好休息。",
        "每天早上陪{topic}玩一会儿。",
        "每年春天带{topic}去看兽医。",
    ),
    "places": (
        "早点去{topic}，人少路也好走。",
        "去{topic}要带地图，别走错路。",
        "春天的{topic}最美，记得带外套。",
        "找个导游一起逛{topic}，多带点水。",
    ),
    "hobbies": (
        "学{topic}要一步一步来，别太累。",
        "有个好老师，学{topic}会轻松很多。",
        "每天花点时间练{topic}，慢慢来。",
        "找个朋友一起学{topic}，互相鼓励。",
    ),
}
LAZY = (  # too lazy to name the topic
    "上网搜一下就知道了。",
    "这个没什么好说的。",
    "差不多就行，随便吧。",
    "你去问别人吧。",
)
POLITE = (
    "谢谢你的提问。",
    "很高兴能帮到你。",
    "这个问题问得真好。",
    "好的，我很乐意回答。",
)
RUDE = (
    "这你都不知道？",
    "唉，真是个无聊的问题。",
    "你怎么又来烦我？",
    "别浪费我的时间。",
)
CLOSINGS = (
    "有结果了告诉我。",
    "希望对你有帮助。",
    "欢迎随时再来问。",
    "祝你一切顺利。",
)
