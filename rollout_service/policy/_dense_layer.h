/* tanh(x W' + b) over rows, forward and backward. Products as in _tiles.h.

   Axis letters: M rows, D inputs, H outputs. Arrays are float32, C order: x [M, D], weight [H, D], out [M, H]. */

enum { CHUNK_ROWS = 128 }; /* rows whose slopes stay cached until those of the weights are formed */

/* weights, bias: laid out, [panels_of(H)][D][32] and [panels_of(H)][32]. */
AVX512 static void dense_forward(Py_ssize_t count, Py_ssize_t inputs, Py_ssize_t outputs, const float *x,
                                 const float *weights, const float *bias, float *out)
{
    for (Py_ssize_t first = 0; first < count; first += TILE, x += TILE * inputs, out += TILE * outputs)
        for (Py_ssize_t column = 0; column < outputs; column += WIDTH) {
            Tile tile;
            const uint32_t within = columns_left(outputs - column);
#define ROWS_OF_A_TILE(ROWS) \
    EACH(r, ROWS) { \
        tile[r][0] = _mm512_loadu_ps(bias + column); \
        tile[r][1] = _mm512_loadu_ps(bias + column + LANES); \
    } \
    multiply(ROWS, tile, x, inputs, 1, inputs, weights + column * inputs); \
    EACH(r, ROWS) { \
        float *to = out + r * outputs + column; \
        _mm512_mask_storeu_ps(to, (__mmask16)within, hyperbolic_tangent(tile[r][0])); \
        _mm512_mask_storeu_ps(to + LANES, (__mmask16)(within >> LANES), hyperbolic_tangent(tile[r][1])); \
    }
            FOR_ROWS(tile_rows(count - first), ROWS_OF_A_TILE)
#undef ROWS_OF_A_TILE
        }
}

/* What the way back works on. */
enum { DENSE_WEIGHTS, BY_DENSE_WEIGHTS, BY_DENSE_BIAS, DENSE_SLOPES, DENSE_SCRATCH };

static void dense_scratch(Py_ssize_t inputs, Py_ssize_t outputs, Py_ssize_t *floats)
{
    const Py_ssize_t columns = panels_of(outputs) * WIDTH;
    floats[DENSE_WEIGHTS] = columns * panels_of(inputs) * WIDTH;
    floats[BY_DENSE_WEIGHTS] = columns * inputs;
    floats[BY_DENSE_BIAS] = columns;
    floats[DENSE_SLOPES] = columns * CHUNK_ROWS;
}

/* Slopes in front of the tanh, half a panel: by_out (1 - out^2), 0 outside. */
INLINE __m512 slopes_inside(const float *out, const float *by_out, uint32_t within)
{
    __m512 y = _mm512_maskz_loadu_ps((__mmask16)within, out);
    return _mm512_mul_ps(_mm512_maskz_loadu_ps((__mmask16)within, by_out), _mm512_fnmadd_ps(y, y, _mm512_set1_ps(1.0f)));
}

/* by_x: NULL if nobody asks. scratch: weights laid out, if by_x is asked for; slopes of weights and bias are left
   there. */
AVX512 static void dense_backward(Py_ssize_t count, Py_ssize_t inputs, Py_ssize_t outputs, const float *x,
                                  const float *out, const float *by_out, float *const *scratch, float *by_x)
{
    const Py_ssize_t panels = panels_of(outputs);
    memset(scratch[BY_DENSE_WEIGHTS], 0, panels * WIDTH * inputs * sizeof(float));
    memset(scratch[BY_DENSE_BIAS], 0, panels * WIDTH * sizeof(float));
    for (Py_ssize_t begin = 0; begin < count; begin += CHUNK_ROWS) {
        const Py_ssize_t rows = count - begin < CHUNK_ROWS ? count - begin : CHUNK_ROWS;
        for (Py_ssize_t panel = 0; panel < panels; panel++) {
            const uint32_t within = columns_left(outputs - panel * WIDTH);
            float *slopes = scratch[DENSE_SLOPES] + panel * CHUNK_ROWS * WIDTH;
            for (Py_ssize_t row = 0; row < rows; row++) {
                const Py_ssize_t at = (begin + row) * outputs + panel * WIDTH;
                _mm512_storeu_ps(slopes + row * WIDTH, slopes_inside(out + at, by_out + at, within));
                _mm512_storeu_ps(slopes + row * WIDTH + LANES,
                                 slopes_inside(out + at + LANES, by_out + at + LANES, within >> LANES));
            }
            weight_slopes(x + begin * inputs, inputs, rows, slopes, scratch[BY_DENSE_WEIGHTS] + panel * inputs * WIDTH);
            bias_slopes(rows, slopes, scratch[BY_DENSE_BIAS] + panel * WIDTH);
        }
        for (Py_ssize_t first = 0; by_x != NULL && first < rows; first += TILE) {
#define ROWS_OF_A_TILE(ROWS) \
    input_slopes(ROWS, panels, scratch[DENSE_SLOPES] + first * WIDTH, CHUNK_ROWS, scratch[DENSE_WEIGHTS], NULL, \
                 by_x + (begin + first) * inputs, inputs)
            FOR_ROWS(tile_rows(rows - first), ROWS_OF_A_TILE)
#undef ROWS_OF_A_TILE
        }
    }
}
