CREATE MACRO texts(items) AS array_to_string(list_transform(items, lambda i: i.text), ' | ');
CREATE MACRO compared(items) AS
    list_transform(items, lambda i: (i.text, i.tool_calls, i.embedding, i.label, i.probs, i.score));

-- The rows that run A or run B has done, side by side. *_ok is null where the run has not done the row.
CREATE TABLE pairs AS
WITH joined AS (
    SELECT
        coalesce(a._row, b._row) AS row,
        coalesce(a._id, b._id) AS id,
        CASE WHEN a._row IS NOT NULL THEN a.error_code IS NULL END AS a_ok,
        CASE WHEN b._row IS NOT NULL THEN b.error_code IS NULL END AS b_ok,
        coalesce(a.error_code, texts(a.items), a.text, a.label) AS a_text,
        coalesce(b.error_code, texts(b.items), b.text, b.label) AS b_text,
        a.completion_tokens AS a_tokens,
        b.completion_tokens AS b_tokens,
        (a.text, a.tool_calls, a.embedding, a.label, a.probs, a.score, a.results, compared(a.items))
            IS NOT DISTINCT FROM
        (b.text, b.tool_calls, b.embedding, b.label, b.probs, b.score, b.results, compared(b.items)) AS equal
    FROM a FULL JOIN b ON a._row = b._row
), words AS (
    SELECT *,
        CASE WHEN a_ok AND b_ok THEN equal END AS is_same,
        list_distinct(string_split(a_text, ' ')) AS a_words,
        list_distinct(string_split(b_text, ' ')) AS b_words
    FROM joined
)
SELECT * EXCLUDE (a_words, b_words, equal),
    -- An answer without text, such as a call of a tool, has no word in common with one.
    coalesce(len(list_intersect(a_words, b_words)), 0) / len(list_distinct(list_concat(a_words, b_words))) AS common
FROM words;

-- The views below are what `compare` tells, in this order. Answers are those of rows that both runs have answered.
CREATE VIEW figures AS SELECT
    count(*) AS "rows",
    count(*) FILTER (is_same) AS "same answer",
    count(*) FILTER (NOT is_same) AS "different answers",
    avg(common) FILTER (NOT is_same) AS "share of words in common, where they differ",
    count(*) FILTER (NOT a_ok AND NOT b_ok) AS "failed in both"
FROM pairs;

CREATE VIEW sides AS SELECT
    'A' AS run,
    count(*) FILTER (NOT a_ok AND b_ok) AS "failed here only",
    count(*) FILTER (a_ok IS NULL) AS "missing here only",
    avg(length(a_text)) FILTER (is_same IS NOT NULL) AS "characters an answer",
    avg(a_tokens) FILTER (is_same IS NOT NULL) AS "tokens an answer"
FROM pairs UNION ALL SELECT
    'B',
    count(*) FILTER (a_ok AND NOT b_ok),
    count(*) FILTER (b_ok IS NULL),
    avg(length(b_text)) FILTER (is_same IS NOT NULL),
    avg(b_tokens) FILTER (is_same IS NOT NULL)
FROM pairs;

CREATE VIEW errors AS
SELECT error_code, count(*) FILTER (run = 'A') AS A, count(*) FILTER (run = 'B') AS B
FROM (SELECT 'A' AS run, error_code FROM a UNION ALL SELECT 'B', error_code FROM b)
WHERE error_code IS NOT NULL GROUP BY ALL ORDER BY A + B DESC, 1;

CREATE VIEW changes AS  -- of short answers, such as labels
SELECT a_text AS A, b_text AS B, count(*) AS rows FROM pairs
WHERE NOT is_same AND greatest(length(a_text), length(b_text)) <= 60
GROUP BY ALL HAVING count(*) > 1 ORDER BY rows DESC, A, B LIMIT 10;

CREATE VIEW differing AS
SELECT row, id, left(a_text, 2000) AS A, left(b_text, 2000) AS B, common AS words_in_common FROM pairs
WHERE NOT is_same OR a_ok <> b_ok ORDER BY common, row;
