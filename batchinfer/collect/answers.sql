-- The text of the items of one type of an answer of the Responses API.
CREATE OR REPLACE MACRO text_of(items, kind) AS array_to_string(list_transform(
    list_filter(items, lambda i: i.type = kind),
    lambda i: array_to_string(list_transform(i.content, lambda p: p.text), '')
), '');

-- The columns of the output lines, which the file functions put in the place of FILES. Columns that end with _list hold
-- one item for each answer or input of a row. What a body has in another type than here counts as missing.
WITH lines AS (
    SELECT json AS line, json_transform(json, '{
        "_row": "BIGINT", "_id": "VARCHAR", "status": "INTEGER",
        "error": {"code": "VARCHAR", "message": "VARCHAR"},
        "body": {
            "model": "VARCHAR",
            "usage": {
                "prompt_tokens": "BIGINT", "completion_tokens": "BIGINT",
                "completion_tokens_details": {"reasoning_tokens": "BIGINT"},
                "input_tokens": "BIGINT", "output_tokens": "BIGINT",
                "output_tokens_details": {"reasoning_tokens": "BIGINT"}
            },
            "choices": [{
                "text": "VARCHAR", "finish_reason": "VARCHAR", "logprobs": "JSON",
                "message": {
                    "content": "VARCHAR", "reasoning": "VARCHAR", "reasoning_content": "VARCHAR", "tool_calls": "JSON"
                }
            }],
            "output": [{"type": "VARCHAR", "content": [{"text": "VARCHAR"}]}],
            "incomplete_details": {"reason": "VARCHAR"},
            "text": "VARCHAR",
            "data": [{
                "embedding": "JSON", "data": "JSON", "label": "VARCHAR", "probs": ["DOUBLE"], "score": "DOUBLE"
            }],
            "results": [{"index": "BIGINT", "relevance_score": "DOUBLE"}]
        }
    }') AS l
    FROM FILES
), bodies AS (
    SELECT line, l, l.body AS b, l.body.usage AS u FROM lines
)
SELECT
    l._row AS _row,
    l._id AS _id,
    l.status AS status,
    CASE
        WHEN b.choices IS NOT NULL THEN list_transform(b.choices, lambda c: coalesce(c.message.content, c.text))
        WHEN b.output IS NOT NULL THEN [text_of(b.output, 'message')]
        WHEN b.text IS NOT NULL THEN [b.text]
    END AS text_list,
    CASE
        WHEN b.choices IS NOT NULL
            THEN list_transform(b.choices, lambda c: coalesce(c.message.reasoning, c.message.reasoning_content))
        WHEN b.output IS NOT NULL THEN [nullif(text_of(b.output, 'reasoning'), '')]
    END AS reasoning_list,
    CASE
        WHEN b.choices IS NOT NULL THEN list_transform(b.choices, lambda c: c.message.tool_calls::VARCHAR)
        WHEN b.output IS NOT NULL
            THEN [to_json(nullif(list_filter(
                json_extract(line, '$.body.output[*]'), lambda i: i->>'$.type' = 'function_call'), []))::VARCHAR]
    END AS tool_calls_list,
    CASE
        WHEN b.choices IS NOT NULL THEN list_transform(b.choices, lambda c: c.finish_reason)
        WHEN b.output IS NOT NULL
            THEN [coalesce(if(b.incomplete_details.reason = 'max_output_tokens', 'length', b.incomplete_details.reason), 'stop')]
    END AS finish_reason_list,
    list_transform(b.choices, lambda c: c.logprobs::VARCHAR) AS logprobs_list,
    list_transform(b.data, lambda d: coalesce(d.embedding, d.data)::VARCHAR) AS embedding_list,
    list_transform(b.data, lambda d: d.label) AS label_list,
    list_transform(b.data, lambda d: d.probs) AS probs_list,
    list_transform(b.data, lambda d: d.score) AS score_list,
    list_transform(b.results, lambda r: {'index': r."index", 'score': r.relevance_score}) AS results,
    b.model AS model,
    coalesce(u.prompt_tokens, u.input_tokens) AS prompt_tokens,
    coalesce(u.completion_tokens, u.output_tokens) AS completion_tokens,
    coalesce(u.completion_tokens_details.reasoning_tokens, u.output_tokens_details.reasoning_tokens) AS reasoning_tokens,
    l.error.code AS error_code,
    l.error.message AS error_message,
    if(KEEPS_LINES, line::VARCHAR, NULL) AS line
FROM bodies
