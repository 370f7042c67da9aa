-- The text of the items of one type of an answer of the Responses API.
CREATE OR REPLACE MACRO text_of(items, kind) AS array_to_string(list_transform(
    list_filter(items, lambda i: i.type = kind),
    lambda i: array_to_string(list_transform(i.content, lambda p: p.text), '')
), '');

-- The columns of output lines, each with the number of its row and the line of its chunk: of the first answer or input, and
-- in `items` of all, where there are several. What a body has in another type than here counts as missing.
CREATE OR REPLACE MACRO columns_of(some_lines, keeps_lines) AS TABLE
WITH lines AS (
    SELECT *, json_transform(line, '{
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
    FROM query_table(some_lines)
), bodies AS (
    SELECT *, l.body AS b, l.body.usage AS u, l.body.choices[1] AS c, l.body.data[1] AS d FROM lines
)
SELECT
    if(l._row IS NOT DISTINCT FROM wanted, wanted, error('row ' || wanted || ' is not in its place')) AS _row,
    l._id AS _id,
    l.status AS status,
    CASE WHEN b.output IS NULL THEN coalesce(c.message.content, c.text, b.text)
        WHEN list_contains(list_transform(b.output, lambda i: i.type), 'message') THEN text_of(b.output, 'message')
    END AS text,
    CASE WHEN b.output IS NULL THEN coalesce(c.message.reasoning, c.message.reasoning_content)
        ELSE nullif(text_of(b.output, 'reasoning'), '')
    END AS reasoning,
    CASE WHEN b.output IS NULL THEN nullif(c.message.tool_calls::VARCHAR, '[]') ELSE to_json(nullif(list_filter(
        json_extract(line, '$.body.output[*]'), lambda i: i->>'$.type' = 'function_call'), []))::VARCHAR
    END AS tool_calls,
    CASE WHEN b.output IS NULL THEN c.finish_reason ELSE coalesce(
        if(b.incomplete_details.reason = 'max_output_tokens', 'length', b.incomplete_details.reason), 'stop')
    END AS finish_reason,
    c.logprobs::VARCHAR AS logprobs,
    coalesce(d.embedding, d.data)::VARCHAR AS embedding,
    d.label AS label,
    d.probs AS probs,
    d.score AS score,
    CASE
        WHEN len(b.choices) > 1 THEN list_transform(b.choices, lambda i: {
            'text': coalesce(i.message.content, i.text),
            'reasoning': coalesce(i.message.reasoning, i.message.reasoning_content),
            'tool_calls': nullif(i.message.tool_calls::VARCHAR, '[]'), 'finish_reason': i.finish_reason,
            'logprobs': i.logprobs::VARCHAR,
            'embedding': NULL::VARCHAR, 'label': NULL::VARCHAR, 'probs': NULL::DOUBLE[], 'score': NULL::DOUBLE
        })
        WHEN len(b.data) > 1 THEN list_transform(b.data, lambda i: {
            'text': NULL::VARCHAR, 'reasoning': NULL::VARCHAR, 'tool_calls': NULL::VARCHAR, 'finish_reason': NULL::VARCHAR,
            'logprobs': NULL::VARCHAR,
            'embedding': coalesce(i.embedding, i.data)::VARCHAR, 'label': i.label, 'probs': i.probs, 'score': i.score
        })
    END AS items,
    list_transform(b.results, lambda r: {'index': r."index", 'score': r.relevance_score}) AS results,
    b.model AS model,
    coalesce(u.prompt_tokens, u.input_tokens) AS prompt_tokens,
    coalesce(u.completion_tokens, u.output_tokens) AS completion_tokens,
    coalesce(u.completion_tokens_details.reasoning_tokens, u.output_tokens_details.reasoning_tokens) AS reasoning_tokens,
    l.error.code AS error_code,
    l.error.message AS error_message,
    if(keeps_lines, rtrim(line, chr(10)), NULL) AS line,
    source
FROM bodies;
