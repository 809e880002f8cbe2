/* RMSNorm over the last axis in float32, forward and backward, checked with golden vectors (docs/ci.md). Plain C.
 *
 *     cc -O2 -o rms_norm examples/rms_norm.c -lm
 *     rmsnorm vectors write vectors --variant gemma --dtype float32 --quantity y --quantity dx --quantity dscale
 *     mkdir vectors/outputs && ./rms_norm vectors/gemma.*.safetensors && rmsnorm vectors check vectors
 *
 * -DEPS_OUTSIDE adds eps outside the root: a mistake, which the last command reports. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* header: {"__metadata__":{"eps":"1e-06",...},"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},...} */
static char *header, *data;
static void check(int holds, const char *what, const char *name) {
    if (!holds) fprintf(stderr, "rms_norm: %s: %s\n", what, name), exit(2);
}

static void load(const char *path) {
    FILE *file = fopen(path, "rb");
    size_t length = 0, size = 0; /* bytes of the header, from 8 little-endian bytes; bytes of the tensors */
    check(file && fread(&length, 8, 1, file) == 1, "cannot be read", path);
    fseek(file, 0, SEEK_END);
    check(length <= (size = (size_t)ftell(file) - 8), "cut off", path);
    header = calloc(length + 1, 1), data = malloc(size -= length);
    fseek(file, 8, SEEK_SET);
    check(fread(header, 1, length, file) == length && fread(data, 1, size, file) == size, "cannot be read", path);
    fclose(file);
}

static const char *find(const char *name, const char *prefix) { /* the text after "name":prefix in the header */
    char key[96];
    snprintf(key, sizeof key, "\"%s\":%s", name, prefix);
    const char *match = strstr(header, key);
    return match ? match + strlen(key) : NULL;
}

static double number(const char *name) {
    return check(find(name, "\"") != NULL, "not in the metadata", name), atof(find(name, "\""));
}

static const float *tensor(const char *name, size_t *size) {
    size_t begin = 0, end = 0;
    const char *text = find(name, "{\"dtype\":\"F32\"");
    if (text) sscanf(strstr(text, "data_offsets"), "data_offsets\":[%zu,%zu", &begin, &end);
    if (size) *size = (end - begin) / 4;
    return text ? (const float *)(data + begin) : NULL;
}

/* Writes DIR/outputs/NAME for DIR/NAME. y and dx have the shape of x. */
static void save(const char *path, size_t size, size_t n, const float *y, const float *dx, const float *dscale) {
    char out[4096], text[1024];
    const char *name = strrchr(path, '/') + 1, *shape = find("x", "{\"dtype\":\"F32\""); /* ,"shape":[2,3],... */
    int chars = (int)(strchr(shape, ']') - shape) + 1;
    snprintf(out, sizeof out, "%.*soutputs/%s", (int)(name - path), path, name);
    size_t a = 4 * size, b = 8 * size, c = b + 4 * n, length = (size_t)snprintf(text, sizeof text,
        "{\"y\":{\"dtype\":\"F32\"%.*s,\"data_offsets\":[0,%zu]},\"dx\":{\"dtype\":\"F32\"%.*s,\"data_offsets\":[%zu"
        ",%zu]},\"dscale\":{\"dtype\":\"F32\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}}",
        chars, shape, a, chars, shape, a, b, n, b, c);
    FILE *file = fopen(out, "wb");
    check(file != NULL, "cannot be written; make the folder outputs", out);
    size_t written = fwrite(&length, 8, 1, file) + fwrite(text, length, 1, file) + fwrite(y, 4, size, file) +
                     fwrite(dx, 4, size, file) + fwrite(dscale, 4, n, file);
    check(fclose(file) == 0 && written == 2 + 2 * size + n, "cannot be written", out);
}

int main(int count, char **paths) {
    if (count < 2) fputs("usage: rms_norm DIR/NAME.safetensors ...   (rmsnorm vectors write DIR makes them)\n", stderr), exit(2);
    for (int i = 1; i < count; i++) {
        load(paths[i]);
        size_t size, n = (size_t)number("n");
        const float *x = tensor("x", &size), *scale = tensor("scale", NULL), *bias = tensor("bias", NULL);
        const float *residual = tensor("residual", NULL), *dy = tensor("dy", NULL), *dh = tensor("dh", NULL);
        check(x && dy && n && strchr(paths[i], '/'), "expected DIR/NAME with x in float32", paths[i]);
        float *y = calloc(size, 4), *dx = calloc(size, 4), *dscale = calloc(n, 4);
        double *h = calloc(n, 8), *gain = calloc(n, 8), *sum = calloc(n, 8), eps = number("eps");
        for (size_t j = 0; j < n; j++) gain[j] = scale ? number("scale_offset") + scale[j] : 1;
        for (size_t row = 0; row < size; row += n) {
            double square = 0, inner = 0;
            for (size_t j = 0; j < n; j++) {
                h[j] = residual ? x[row + j] + residual[row + j] : x[row + j];
                square += h[j] * h[j] / n;
            }
            double rho = sqrt(square + eps);
#ifdef EPS_OUTSIDE
            rho = sqrt(square) + eps;
#endif
            for (size_t j = 0; j < n; j++) {
                h[j] /= rho;
                y[row + j] = (float)(h[j] * gain[j] + (bias ? bias[j] : 0));
                inner += dy[row + j] * gain[j] * h[j] / n;
                sum[j] += dy[row + j] * h[j];
            }
            for (size_t j = 0; j < n; j++)
                dx[row + j] = (float)((dy[row + j] * gain[j] - h[j] * inner) / rho + (dh ? dh[row + j] : 0));
        }
        for (size_t j = 0; j < n; j++) dscale[j] = (float)sum[j];
        save(paths[i], size, n, y, dx, dscale);
    }
}
